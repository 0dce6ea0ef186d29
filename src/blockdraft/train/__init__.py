"""Training of drafters: from a target and prompts to an exported checkpoint. Needs no other product layer."""
