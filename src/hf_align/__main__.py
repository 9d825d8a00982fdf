"""`python -m hf_align`, and the command `hf-align`."""

import gc
import os
import sys

_SPINS = "1000"
"""How long threads of libgomp wait actively: what it takes itself where it knows that cores are scarce (libgomp manual,
GOMP_SPINCOUNT). By default they spin 300 times as long, and on cores that others use as well, work takes nine times as
long as it would."""
_NEW_OBJECTS = 50_000
"""How many objects are made before garbage is looked for: by default 700, and of loading libraries and tracing models,
which make millions that stay, an eighth of the time went into looking."""


def main() -> None:
    """Run the command line; loading its libraries takes seconds, in which it may be interrupted."""
    gc.set_threshold(_NEW_OBJECTS)
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read once, when torch is loaded
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # likewise: convolutions would round to 10 bits by default
    try:
        from hf_align.cli.app import main as run
    except KeyboardInterrupt:
        print("hf-align: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
