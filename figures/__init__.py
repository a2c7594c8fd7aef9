"""One file per figure: READS, reduce(rows, manifest), draw(table, manifest). Found by `kvprobe.registry`."""
