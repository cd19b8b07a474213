"""Rows of any size and number from their sources to the splits of a data set.

sources     what a path, URL or hub name stands for: files
formats     the rows of a part of a file
blend_file  the public blend file: data sets and weights; what identifies the data that a config names
shards      one part of a file to one shard, each row kept as it is, changed, refused or left out, and counted
workers     every part, over processes, going on where a killed attempt stopped
splits      shards to split files
prepare     all of it, for a step
"""
