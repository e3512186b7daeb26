#!/usr/bin/env bash
# Makes the site (site/, a static folder) from docs/, the README and the docstrings, in an environment of its own
# (.venvs/docs). A link that leads nowhere and a page that mkdocs.yml does not list are errors.
#   REPO_URL links to the repository, SITE_URL is where the site will be: neither is needed. Arguments go to mkdocs.
set -euo pipefail
source "$(dirname "$0")/common.sh"
VENV=${VENV:-$ROOT/.venvs/docs}
"$(find_python)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "the site needs Python 3.11 or newer: PYTHON=python3.11"
prepare docs
cd "$ROOT"
NO_MKDOCS_2_WARNING=1 "$PY" -m mkdocs build --strict --quiet "$@"
