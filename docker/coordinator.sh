#!/bin/sh
# The coordinator of docker/tls.yaml: its folder is made at the first start.
set -eu
folder=/federation
if [ ! -e "$folder/coterie.toml" ]; then
    coterie federation init "$folder" --address superlink --address coordinator --operators coordinator
fi
exec coterie superlink --federation "$folder"
