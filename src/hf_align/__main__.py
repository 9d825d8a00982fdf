"""`python -m hf_align`, and the command `hf-align`."""

import sys


def main() -> None:
    """Run the command line; loading its libraries takes seconds, in which it may be interrupted."""
    try:
        from hf_align.cli.app import main as run
    except KeyboardInterrupt:
        print("hf-align: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
