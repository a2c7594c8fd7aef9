"""The pieces of the oracle suite (kvprobe.probes.oracle_suite): orders of the criteria, rows, answers, deletions, stored pieces, tables, drawing."""
