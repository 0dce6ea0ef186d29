"""Hybrid targets end to end: tiny ones trained on real text, drafters trained on them, text compared.

One file each for the text and its tokenizer (prose), the two targets (targets), how one is taught (lesson), the
drafter's recipe and run (drafting), serving and comparing (serving), the table (shown), and the order of it all
(__main__). Recipes of the drafters: qwen3_5.toml, kimi_k3.toml.
"""
