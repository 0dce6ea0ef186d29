"""Honest numbers: prompts, runs of anything that answers them, records, tables with intervals, reports.

One run is a list of settings (`system.Setting`) over data sets (`workloads`), answered by a system under test
(`system.System`); every request becomes one line of a journal (`record.RequestRecord`), and every table is made of
records alone. Import from the submodules: only some of them need torch.
"""
