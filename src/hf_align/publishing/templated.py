"""The templates of what a merge says of itself, each compiled once."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape

from hf_align.publishing.markdown import block, code, plain


def template(name: str) -> Template:
    """One of the files in `templates`; what a page shows is escaped, and text is as it stands."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hf_align.publishing"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=select_autoescape(["html.j2"]),
    )
    environment.filters |= {"plain": plain, "code": code, "block": block}
    return environment
