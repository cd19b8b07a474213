"""Rows of any size and number from their sources to the splits of a data set.

sources     what a path, URL or hub name stands for: files
formats     the rows of a part of a file
blend_file  the public blend file: data sets and weights
row_work    what becomes of one row: kept as it is, changed, or refused
shards      one part of a file to one shard, committed atomically with its accounts
workers     every part, over processes, going on where a killed attempt stopped
splits      shards to split files
accounts    rows in = rows out + refusals by reason
prepare     all of it, for a step
"""
