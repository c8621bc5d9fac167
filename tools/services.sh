#!/usr/bin/env bash
# Install the servers of tests/services that are Debian packages: redis-server, libibverbs1, which Mooncake
# needs, and iproute2 for tests with network namespaces. Only where this runs as root and they
# are missing; otherwise say what to install and go on: the tests skip what they cannot find.
# Azurite, the stand-in for Azure's Blob service, comes from npm, where that is installed, into the environment's folder.
set -euo pipefail

azurite="${VENV:-.venv}/azurite"
if [[ ! -x $azurite/node_modules/.bin/azurite-blob ]]; then
    if command -v npm >/dev/null; then
        npm install --prefix "$azurite" --silent --no-audit --no-fund azurite@3.37.0 ||
            echo "services: azurite could not be installed" >&2
    else
        echo "services: not installed: azurite (it needs npm)" >&2
    fi
fi

missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v redis-server >/dev/null || command -v valkey-server >/dev/null || missing+=(redis-server)
ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1)
[[ ${#missing[@]} == 0 ]] && exit
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "services: not installed: ${missing[*]} (apt-get install ${missing[*]})" >&2
    exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
