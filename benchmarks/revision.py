"""The revision that a table is of."""

import subprocess
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def revision() -> str:
    """The commit that is checked out, with a mark where the package itself was changed since; unknown in a copy."""
    if not (_ROOT / ".git").exists():
        return "unknown"
    commit, changed = (
        subprocess.run(["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", "src"))
    )
    return f"{commit}-dirty" if changed else commit
