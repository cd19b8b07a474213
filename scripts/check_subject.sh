#!/bin/sh
# A commit's subject has at most 72 characters. scripts/check_subject.sh MESSAGE_FILE
length=$(head -n 1 "$1" | tr -d '\n' | wc -m)
[ "$length" -le 72 ] || { echo "the subject has $length characters, 72 are allowed" >&2; exit 1; }
