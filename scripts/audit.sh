#!/bin/sh
# Holds the dependencies to deny.toml, and looks them up among known vulnerabilities.
#
# Needs cargo-deny and cargo-audit (`cargo install --locked cargo-deny cargo-audit`), and the network for the
# list of vulnerabilities; what is missing is said and skipped.
set -eu
cd "$(dirname "$0")/.."
if command -v cargo-deny >/dev/null; then
  cargo deny check licenses bans sources
else
  echo "audit: cargo-deny is not installed; licenses, bans and sources skipped" >&2
fi
if ! command -v cargo-audit >/dev/null; then
  echo "audit: cargo-audit is not installed; vulnerabilities skipped" >&2
elif [ -z "${ROTE_OFFLINE:-}" ]; then
  cargo audit
fi
