"""The page on a merge: what it says, and that a browser draws it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import DATA, MODELS, built, run, save, tiny_bert, tiny_vit
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

from hf_align.publishing.provenance import Provenance
from hf_align.publishing.report import _ticks
from hf_align.running.generate import continued
from hf_align.running.network import Network

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_VOID = {"meta", "br", "wbr"}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge with everything that a page can show."""
    out = tmp_path_factory.mktemp("merge") / "out"
    data = DATA / "eval_digits.safetensors"
    options = ("--data", data, "--points", "5", "--certify", "--quiet")
    assert run("merge", *(MODELS / "vit" / s for s in "01"), "-o", out, *options) == 0
    assert run("report", out) == 0
    return out


class Page(HTMLParser):
    """Which tags there are, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_well_formed(merged: Path) -> None:
    text = (merged / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not re.search(r"(src|href)=|https?://|@import|<script", text)
    assert str(MODELS) not in text and "nan" not in text.lower().split()
    for tag, attributes in page.seen:
        if tag == "rect":
            assert float(attributes["width"] or -1) >= 0 and float(attributes["height"] or -1) >= 0


def test_the_page_says_what_was_measured(merged: Path) -> None:
    text = (merged / "report.html").read_text()
    made = Provenance.load(merged)
    assert made.comparison and made.certificate
    assert f"{made.comparison['aligned']['barrier']:.3f}</b>" in text
    assert f"{made.certificate['complete']['found']} of {made.certificate['complete']['nullity']}" in text
    assert f"{made.certificate['complete']['moved']} are matched" in text and "answer as they did" in text
    points = re.findall(r'<polyline points="([^"]*)"', text)
    assert [len(p.split()) for p in points] == [2, 5, 5]
    lowest = [max(float(xy.split(",")[1]) for xy in p.split()) for p in points]
    assert max(lowest) <= 262 + 0.1
    assert "vit.layers.*.attention.q_proj.weight" in text or "attention.query.weight" in text
    assert "OrthogonalFixingOnes" in text and "GeneralLinear" in text
    assert re.search(r"turned by \d+° on average", text) and re.search(r"\d+% of the entries elsewhere", text)
    angles = text[text.index('id="angles"') : text.index('id="spec"')]
    assert angles.count('<circle cx="') == 96 + 1  # the residual stream, and the circle itself
    assert "kernel: conv2d" in text  # why patches do not move
    atlas = text[text.index('class="atlas"') :]
    token = atlas[: atlas.index("cls_token<br>")]
    assert "<title>96: residual</title>" in token[token.rindex("<svg") :]  # the axis that moves, not those of size 1


def test_features_are_drawn_by_layer(merged: Path) -> None:
    """One dot for each layer and side, as high as the mean of what the provenance has."""
    text = (merged / "report.html").read_text()
    section = text[text.index('id="features"') : text.index('id="agreement"')]
    made = Provenance.load(merged)
    assert made.comparison
    for side in ("naive", "aligned"):
        for layer in range(4):
            found = {(f[side]): name for name, f in made.comparison["features"].items() if f".{layer}." in name}
            mean = sum(found) / len(found)
            assert f"<title>{mean:.3f}</title>" in section, (side, layer)
    dots = [tuple(map(float, xy)) for xy in re.findall(r'<circle cx="([^"]*)" cy="([^"]*)" r="3.5"', section)]
    assert len(dots) == 2 * 4 and all(22 <= y <= 192 for _, y in dots)
    assert re.search(r">[^<]*q_proj, k_proj, v_proj<", section) or "query, " in section  # what they read is one feature


def test_the_page_says_what_the_models_write(merged: Path, tmp_path: Path) -> None:
    """Both models go on as `generate` makes them, and the merge as it is read from its folder."""
    rows = {"input_ids": load_file(DATA / "eval_lm_kjv.safetensors")["input_ids"][:4]}
    save_file(rows, tmp_path / "few.safetensors")
    models, options = [MODELS / "llama" / s for s in "01"], ("--points", "3", "--quiet", "--no-witness")
    out = tmp_path / "out"
    assert run("merge", *models, "-o", out, "--data", tmp_path / "few.safetensors", *options) == 0
    assert run("report", out) == 0
    made, tokenizer = Provenance.load(out), AutoTokenizer.from_pretrained(models[0])
    assert [name for name, _ in made.texts] == ["0", "1", "the merge"]
    for folder, (_, text) in zip([*models, out], made.texts, strict=True):
        model, prompt = AutoModelForCausalLM.from_pretrained(folder), rows["input_ids"][:1, :16].long()
        told = model.generate(prompt, do_sample=False, max_new_tokens=32, attention_mask=torch.ones_like(prompt))[
            0, 16:
        ]
        assert text == tokenizer.decode(told, skip_special_tokens=True)
    page = (out / "report.html").read_text()
    assert all(text in html.unescape(page) for _, text in made.texts)
    assert 'id="texts"' not in (merged / "report.html").read_text()  # which shows images


def test_an_encoder_decoder_writes_too() -> None:
    config = T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    config.architectures = ["T5ForConditionalGeneration"]
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    told = continued(Network(config), weights, torch.arange(2, 8)[None], 5)
    assert told is not None and told.shape[0] == 1 and 1 < told.shape[1] <= 6
    assert continued(Network(tiny_bert()), dict(built(tiny_bert(), 0).named_parameters()), told, 5) is None


def test_reasons_are_in_words(merged: Path) -> None:
    text = (merged / "report.html").read_text()
    assert "moved into the weights around it: vit.layers.0.attention.q_proj.weight" in text
    assert "FoldNorm" not in text and "fixed by" not in text


def test_a_merge_without_data_or_alignment(tmp_path: Path) -> None:
    models = (MODELS / "llama" / "0", MODELS / "llama" / "1")
    assert run("merge", *models, "-o", tmp_path / "out", "--match", "none", "--quiet") == 0
    assert run("report", tmp_path / "out", "-o", tmp_path / "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    assert text.count("Not measured") == 3 and "not moved" in text and "No map that all layers share" in text
    assert Page(text).open == []


@pytest.mark.parametrize("command", ["merge", "transport"])
def test_three_models_with_data_are_not_said_to_be_unmeasured(command: str, tmp_path: Path) -> None:
    config, out = tiny_vit(), tmp_path / "out"
    a, b, c = (save(tmp_path / str(seed), config, seed) for seed in range(3))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, config.num_channels, config.image_size, config.image_size, generator=generator)
    save_file({"pixel_values": images, "labels": torch.arange(8) % config.num_labels}, tmp_path / "data.safetensors")
    how = ["--effort", "quick", a, b, c] if command == "merge" else [a, "--base", b, "--onto", c]
    assert run(command, *how, "-o", out, "--data", tmp_path / "data.safetensors", "--quiet") == 0
    assert run("report", out) == 0
    card, page = (html.unescape((out / file).read_text()) for file in ("README.md", "report.html"))
    assert "no held-out data" not in card and "without held-out data" not in page
    notes = Provenance.load(out).notes
    assert notes and all(note[1:] in card and note[1:] in page for note in notes)
    assert Page((out / "report.html").read_text()).open == []


def test_permutations_only(tmp_path: Path) -> None:
    models = (MODELS / "llama" / "0", MODELS / "llama" / "1")
    assert run("merge", *models, "-o", tmp_path / "out", "--residual", "permutation", "--quiet") == 0
    assert run("report", tmp_path / "out") == 0
    assert "Permutation of 128 dimensions" in (tmp_path / "out" / "report.html").read_text()


def test_a_folder_that_is_no_merge(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", MODELS / "llama" / "0") == 2
    assert "was not written by hf-align merge" in capsys.readouterr().err


@pytest.mark.parametrize(("low", "high"), [(2.55, 4.35), (0.1, 0.1), (0, 1e-5), (-3, 700)])
def test_ticks_enclose(low: float, high: float) -> None:
    ticks = _ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high - 1e-12 and 1 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))


def test_it_links_to_models_of_the_hub(merged: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(merged, tmp_path / "merged")
    made = Provenance.load(folder)
    there = {"name": "org/a", "repository": "org/a", "commit": "c" * 40}
    made.inputs[0] = made.inputs[0].model_copy(update=there)
    made.save(folder)
    assert run("report", folder) == 0
    links = re.findall(r'href="([^"]*)">([^<]*)<', (folder / "report.html").read_text())
    assert links == [(f"https://huggingface.co/org/a/tree/{'c' * 40}", "org/a")]


def test_options_without_a_value_are_left_out(merged: Path) -> None:
    made = Provenance.load(merged)
    assert made.strategy["spaces"] == "" and "spaces" not in made.options and "baseline" not in made.options
    assert made.model_copy(update={"strategy": {"weight": 0.0}}).options == {"weight": 0.0}
    page, card = (merged / "report.html").read_text(), (merged / "README.md").read_text()
    assert "<td>spaces</td>" not in page and "| spaces |" not in card and "| heads | two-stage |" in card


def browse(page: Path, *options: str, width: int, dark: bool = False) -> str:
    """A page in a frame of this width, which no window of a browser has if it is narrow: what the browser prints."""
    assert CHROMIUM is not None
    frame = page.with_name("frame.html")
    shown = f'<iframe src="{page.as_uri()}" style="border:0;width:{width}px;height:6000px"></iframe>'
    listen = "<script>addEventListener('message', e => document.title = e.data)</script>"
    frame.write_text(f'<!doctype html><body style="margin:0">{listen}{shown}')
    scheme = "--blink-settings=preferredColorScheme=0" if dark else "--blink-settings=preferredColorScheme=1"
    window, profile = f"--window-size={max(width, 500)},6000", f"--user-data-dir={page.parent / 'profile'}"
    quiet = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    command = [CHROMIUM, *quiet, scheme, window, profile, *options, frame.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


MEASURE = """<script>
const out = [...document.querySelectorAll("section *")].filter(e =>
  e.getBoundingClientRect().right > e.closest("section").getBoundingClientRect().right + 1 && !e.closest("pre"));
const cells = [...document.querySelectorAll(".cells i")].map(e => e.getBoundingClientRect().width);
const size = e => parseFloat(getComputedStyle(e.querySelector("text")).fontSize);
const letters = [...document.querySelectorAll("svg.chart")].map(e =>
  size(e) * e.getBoundingClientRect().width / e.viewBox.baseVal.width);
parent.postMessage(JSON.stringify([document.documentElement.scrollWidth, out.map(e => e.outerHTML.slice(0, 80)),
  cells.length, Math.min(...cells), Math.min(...letters)]), "*");
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_fits_a_phone_a_tablet_and_a_desk(width: int, merged: Path, tmp_path: Path) -> None:
    """Nothing leaves its card, every cell of a heatmap can be seen, and no letter of a chart is too small to read."""
    page = tmp_path / "page.html"
    page.write_text((merged / "report.html").read_text().replace("</body>", f"{MEASURE}</body>"))
    (said,) = re.findall(r"<title>(.*?)</title>", browse(page, "--virtual-time-budget=2000", "--dump-dom", width=width))
    whole, leaving, cells, narrowest, letter = json.loads(html.unescape(said))
    assert whole <= width and leaving == []
    assert cells == (merged / "report.html").read_text().count('<i title="') > 50
    assert narrowest >= 4 and letter >= 9


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_a_browser_draws_it(width: int, dark: bool, merged: Path, tmp_path: Path) -> None:
    shot = tmp_path / "page.png"
    page = Path(shutil.copy(merged / "report.html", tmp_path / "page.html"))
    browse(page, f"--screenshot={shot}", width=width, dark=dark)
    with Image.open(shot) as picture:
        colours = {colour for count, colour in picture.convert("RGB").getcolors(1 << 24) if count > 100}
    # the curve, and the spaces: residual, heads, hidden units, queries and keys, values; then the cards
    for drawn in ("#3b7dd8", "#e0803a", "#8d5fd3", "#2f9e75", "#c9458b", "#1b212b" if dark else "#ffffff"):
        assert tuple(int(drawn[i : i + 2], 16) for i in (1, 3, 5)) in colours, drawn
