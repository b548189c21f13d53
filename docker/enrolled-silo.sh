#!/bin/sh
# A silo of docker/tls.yaml: NAME and which share of the digits is its data. It makes its key, asks,
# joins with the answer, and serves. What it holds is that of docker/federation.toml.
set -eu
name=$1 share=$2
home=/silo/$name
if [ ! -e "$home/silo.toml" ]; then
    mkdir -p -m 700 "$home"
    cat > "$home/silo.toml.tmp" <<END
name = "$name"
task = "digits"

[data]
split = "iid"
split-permutations = 3
silos = 7
silo = $share
END
    sync "$home/silo.toml.tmp"
    mv "$home/silo.toml.tmp" "$home/silo.toml"
    sync "$home"
fi
if [ ! -e "$home/coordinator.json" ]; then
    coterie silo init --name "$name" --home "$home" > /exchange/request.unfinished
    mv /exchange/request.unfinished /exchange/request
    waited=0
    until [ -s /exchange/join ]; do
        if [ "$waited" -ge 600 ]; then
            echo "nobody let $name in within 600 s: look at the log of 'operator'" >&2
            exit 1
        fi
        sleep 1
        waited=$((waited + 1))
    done
    coterie silo join --home "$home" "$(cat /exchange/join)"
fi
exec coterie silo serve --home "$home"
