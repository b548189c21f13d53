#!/bin/sh
# Make a base image where none can be pulled: Debian with Python, from Debian's own archive.
#   docker/base.sh coterie-base:bookworm      (root; needs debootstrap)
# The machine's CA certificates go into it, so that pip in a container trusts what it trusts here.
set -eu
tag=${1:?usage: docker/base.sh TAG}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    bookworm "$root" >&2
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/*
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
tar -C "$root" -c . | docker import - "$tag"
