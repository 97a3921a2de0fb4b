#!/bin/sh
# Make .env for compose.yaml: fresh random secrets, readable by their owner only. Refuses to write over one, as the
# master key in it opens what is stored: keep a copy of the file elsewhere.
#   sh make-env.sh [FILE]
set -eu
file=${1:-.env}
for tool in head od base64 tr mktemp; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: nothing was made" >&2; exit 1; }
done
hex() { head -c "$1" /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }
key() { head -c 32 /dev/urandom | base64 | tr -d '\n'; }
umask 077
# Made whole, then put in place unless something is there: never half of it, never over another.
draft=$(mktemp "$file.XXXXXX")
trap 'rm -f "$draft"' EXIT
cat >"$draft" <<END
POSTGRES_PASSWORD=$(hex 24)
REDIS_PASSWORD=$(hex 24)
RELAY_ADMIN_KEY=$(hex 32)
RELAY_MASTER_KEYS=k1:$(key)
RELAY_FLOWER_AUTH=relay:$(hex 16)
RELAY_TESTKIT_SECRET=whsec_$(key)
END
ln "$draft" "$file" 2>/dev/null || { echo "$file is there already: it was left as it is" >&2; exit 1; }
echo "$file has new secrets: keep a copy"
