"""The page of a run: what it says, that it is whole, and that a browser has nothing to say about it."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from lightning_amp_plus.diagnosis.cause import Diagnosis
from lightning_amp_plus.monitoring.incidents import evaluation_incident, incident_of
from lightning_amp_plus.monitoring.page import MOST_INCIDENTS, figure_png, render_report
from lightning_amp_plus.step.report import StepReport

VOID = {"meta", "link", "img", "br"}
EVIL = "<script>alert(1)</script>\"'&"


class Page(HTMLParser):
    """The tags of a page, that close what they open, its texts and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.texts.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def a_figure() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.add_subplot().plot([1, 2])
    return figure


def an_incident(step: int = 41, detail: str = "put out 4.3e+05", module: str = "gain", **what: Any) -> dict[str, Any]:
    report = StepReport(
        step, 0, "16-mixed", 1.0, 3, "applied", rescued=True, diagnosis=Diagnosis("forward", module, detail),
        tried=(("16-mixed", 2.0**16), ("16-mixed", 1000.0), ("32-true", 1.0)), **what,
    )  # fmt: skip
    return incident_of(report, epoch=2, batch_idx=7, global_step=40, after=("16-mixed", 1000.0))


def a_page(**parts: Any) -> str:
    given: dict[str, Any] = {"title": "version_3", "summary": [], "settings": [], "incidents": [], "figures": []}
    return render_report(**{**given, **parts})


def test_the_parts_come_in_order_summary_pictures_incidents_settings() -> None:
    page = Page(
        a_page(
            summary=[("applied steps", "1990"), ("skipped steps", "2")],
            figures=[("Loss scale", a_figure()), ("Magnitudes", a_figure())],
            incidents=[an_incident()],
            settings=[("growth_interval", "2000")],
        )
    )
    in_order = (
        *("Summary", "applied steps", "1990", "Pictures", "Loss scale", "Magnitudes", "Incidents", "41"),
        *("Settings", "growth_interval", "2000"),
    )
    found = [page.texts.index(text) for text in in_order]
    assert found == sorted(found)
    assert page.texts[:2] == ["version_3", "version_3"]  # the window's title and the heading


def test_an_incident_tells_all_that_is_known() -> None:
    page = Page(a_page(incidents=[an_incident(moves_to="bf16-mixed", kept=("gain", "wo"))]))
    row = page.texts[page.texts.index("why") + 1 :]
    assert row == [
        *("41", "7, epoch 2", "rescued", "fallback", "to bf16-mixed", "in float32: gain, wo"),
        *("16-mixed at 2^16", "16-mixed at 1000", "32-true", "forward: gain", "put out 4.3e+05"),
    ]
    skipped = incident_of(StepReport(5, 1, "32-true", 1.0, 1, "skipped", "gradients"), 0, 5, 5, ("32-true", 1.0))
    row = Page(a_page(incidents=[skipped])).texts
    assert row[-5:] == ["5", "5, epoch 0, optimizer 1", "skipped", "32-true", "inf or NaN in: gradients"]


def test_a_validation_with_rescued_batches_is_an_incident() -> None:
    row = Page(a_page(incidents=[evaluation_incident(3, 40, 2)])).texts
    assert row[-3:] == ["40", "validation", evaluation_incident(3, 40, 2)["detail"]]


def test_incidents_that_were_not_kept_are_not_said_to_be_none() -> None:
    texts = Page(a_page(incidents=None)).texts
    assert any(text.startswith("They were not kept") for text in texts)
    assert "None was logged." not in texts


def test_pictures_are_in_the_page_with_their_captions() -> None:
    figure = a_figure()
    page = Page(a_page(figures=[("The <scale>", figure)]))
    (image,) = page.all("img")
    assert image["alt"] == "The <scale>"
    kind, data = str(image["src"]).split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == figure_png(figure)
    assert page.texts.count("The <scale>") == 1  # the caption


def test_a_picture_is_a_png_of_144_pixels_to_the_inch() -> None:
    data = figure_png(a_figure())
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (288, 144)


def test_nothing_is_outside_of_the_page_and_nothing_runs() -> None:
    text = a_page(figures=[("a", a_figure())], incidents=[an_incident()])
    page = Page(text)
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert len(addresses) == 2
    assert all(str(address).startswith("data:image/") for address in addresses)
    assert page.all("script") == []
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")


def test_names_cannot_become_markup() -> None:
    incident = an_incident(module=EVIL, detail=EVIL, kept=(EVIL,)) | {"kinds": [EVIL], "tried": [[EVIL, 1.0]]}
    text = a_page(
        title=EVIL, summary=[(EVIL, EVIL)], settings=[(EVIL, EVIL)], figures=[(EVIL, a_figure())], incidents=[incident]
    )
    page = Page(text)
    assert page.all("script") == []
    assert "<script" not in text
    assert sum(EVIL in part for part in page.texts) == 12
    assert [image["alt"] for image in page.all("img")] == [EVIL]


def test_the_newest_incidents_are_shown_first_and_the_others_counted() -> None:
    incidents = [an_incident(step=step) for step in range(MOST_INCIDENTS + 30)]
    page = Page(a_page(incidents=incidents))
    assert len(page.all("tr")) == 1 + MOST_INCIDENTS
    assert "The newest 200 are shown, 30 older ones are not." in page.texts
    steps = [int(text) for text in page.texts if text.isdigit()]
    assert steps == list(range(229, 29, -1))
    assert not any("older" in text for text in Page(a_page(incidents=incidents[:200])).texts)


def test_a_page_of_nothing_says_so() -> None:
    page = Page(a_page())
    assert page.texts == [
        *("version_3", "version_3", "Summary", "Nothing was counted.", "Incidents", "None was logged."),
    ]
    assert page.all("img") == page.all("table") == []


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here to open the page with")
def test_a_browser_shows_it_without_a_word_on_its_console(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(
        a_page(
            summary=[("applied steps", "1990")],
            figures=[("Loss scale", a_figure())],
            incidents=[an_incident(module="block." * 60, detail=EVIL)],
            settings=[("a", "b" * 400)],
        ),
        encoding="utf-8",
    )

    def opened(file: Path) -> tuple[str, list[str]]:
        """Its document as the browser has it, and what the console says."""
        assert BROWSER is not None
        command = [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-first-run"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900", "--dump-dom", file.as_uri()),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]

    document, console = opened(path)
    assert console == []
    page = Page(document[document.index("<html") :])
    assert {"applied steps", "1990", "Loss scale", "41", EVIL} <= set(page.texts)
    assert page.all("script") == []

    # What this test would see: a page that logs, and that measures itself.
    measure = "const root = document.documentElement; document.title = `${root.scrollWidth} in ${root.clientWidth}`"
    measured = f"<script>{measure}; console.error('seen')</script>"
    text = path.read_text(encoding="utf-8")
    policy = re.search(r"<meta http-equiv.*", text)
    assert policy is not None
    (tmp_path / "loud.html").write_text(text.replace(policy[0], "").replace("</body>", f"{measured}</body>"))
    document, console = opened(tmp_path / "loud.html")
    assert len(console) == 1
    assert "seen" in console[0]
    title = re.search("<title>(.*) in (.*)</title>", document)
    assert title is not None
    assert 400 < int(title[1]) == int(title[2]) <= 500, "nothing is wider than the window"
