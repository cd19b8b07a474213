#!/bin/sh
# gcc for any x86-64: what is asked for the processor at hand is compiled for the least one.
for word; do
    shift
    test "$word" = -march=native && word=-march=x86-64
    set -- "$@" "$word"
done
exec gcc "$@"
