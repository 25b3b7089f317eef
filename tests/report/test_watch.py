# SPDX-License-Identifier: Apache-2.0
"""`digen watch`: what it serves, to whom, when it makes a page again; its pages in a browser."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable

import httpx
import pytest
import uvicorn

from tests.chromium import needs_chromium, opened
from tests.report.runs import HOSTILE, add_validation, make_run, metrics_of
from tests.report.test_page import data_of
from verl_digen import cli
from verl_digen.observe.run_files import METRICS
from verl_digen.report import page
from verl_digen.tools.watch import pages
from verl_digen.tools.watch.command import free_port
from verl_digen.tools.watch.pages import Pages, make_app
from verl_digen.trainer.run_output import append_metrics


@pytest.fixture
def root(tmp_path):
    """A folder with two runs, and one beside it that must not be served."""
    for name in ("outputs/digen/a", "outputs/digen/b & c", "outside"):
        make_run(tmp_path / name)
    return tmp_path / "outputs"


class Browser:
    """Asks the application, and keeps its cookies."""

    def __init__(self, root, token=None, host="localhost:8765"):
        self._transport, self._base = httpx.ASGITransport(make_app(root, token=token)), f"http://{host}"
        self._cookies = httpx.Cookies()

    def ask(self, method, address, **options):
        """One request."""

        async def send():
            async with httpx.AsyncClient(
                transport=self._transport, base_url=self._base, cookies=self._cookies
            ) as client:
                answer = await client.request(method, address, **options)
                self._cookies.update(client.cookies)
                return answer

        return asyncio.run(send())

    def get(self, address, **options):
        """The page at an address."""
        return self.ask("GET", address, **options)


def test_it_lists_reports_and_compares_the_runs_of_its_folder(root):
    client = Browser(root)
    listed = data_of(client.get("/").text)
    assert {run["name"] for run in listed["runs"]} == {"digen/a", "digen/b & c"} and listed["root"] == str(root)
    answer = client.get("/run", params={"name": "digen/b & c"})
    assert data_of(answer.text)["heading"]["name"] == "b & c"
    assert '<script src="plotly.js">' in answer.text and len(answer.content) < 1_000_000
    assert client.get("/plotly.js").text == page.plotly()
    both = client.get("/compare", params={"run": ["digen/a", "digen/b & c"]})
    assert len(data_of(both.text)["runs"]) == 2
    for text in (client.get("/").text, answer.text, both.text):
        assert "default-src 'none'" in text and "connect-src 'self'" in text and "://" not in text.split("<style>")[0]
        assert HOSTILE not in text


def test_nothing_but_a_listed_run_is_served(root):
    (root / "link").symlink_to(root.parent / "outside")
    client = Browser(root)
    for name in ("", "link", "../outside", "digen/../../outside", "/etc", "digen/a/../a", "digen", "digen/a/", "a\0"):
        for address, parameter in (("/run", "name"), ("/compare", "run")):
            assert client.get(address, params={parameter: name}).status_code == 404, name
    assert client.get("/digen/a/metrics.jsonl").status_code == client.get("/run").status_code == 404
    assert client.ask("POST", "/run", params={"name": "digen/a"}).status_code == 405


def test_other_machines_need_the_token_and_keep_it_in_a_cookie(root):
    client = Browser(root, token="secret", host="machine:8765")
    for address in ("/", "/?token=wrong", "/?token=", "/run?name=digen/a", "/plotly.js", "/nowhere"):
        answer = client.get(address)
        assert answer.status_code == 403 and "open the address with the token" in answer.text
    answer = client.get("/run?token=secret&name=digen/a")
    assert answer.headers["location"] == "?name=digen%2Fa" and "HttpOnly" in answer.headers["set-cookie"]
    assert client.get("/run?name=digen/a").status_code == 200, "the cookie is enough"


def test_a_page_of_another_site_cannot_read_it_by_a_name_that_leads_here(root):
    assert Browser(root, host="evil.example").get("/").status_code == 403
    assert [Browser(root, host=host).get("/").status_code for host in ("127.0.0.1:1", "[::1]:1")] == [200, 200]


def test_a_page_is_asked_for_changes_without_making_it_and_made_again_after_one(root, monkeypatch):
    client, made = Browser(root), []
    monkeypatch.setattr(pages, "MAX_SHARE", 1e9)  # it may be made again at once
    monkeypatch.setattr(pages, "collect", lambda path: made.append(path) or page.collect(path))
    address = "/run?name=digen/a"
    etag = client.ask("HEAD", address).headers["etag"]
    assert not made
    answer = client.get(address)
    assert answer.headers["etag"] == etag == data_of(answer.text)["etag"]
    assert client.get(address).headers["etag"] == etag and len(made) == 1
    with open(root / "digen/a" / METRICS, "a") as out:
        out.write('{"step": 5, "val')
    assert client.ask("HEAD", address).headers["etag"] != etag
    assert data_of(client.get(address).text)["curves"]["columns"]["step"][-1] == 4 and len(made) == 2


def test_a_page_that_takes_long_is_not_made_again_at_once(root):
    clock, made = iter([*range(0, 1000, 10)]), []
    made_pages, runs = Pages(now_s=lambda: next(clock)), {"a": root / "digen/a"}

    def make(_):
        made.append(1)
        return page.collect(root / "digen/a"), "report"

    first, _ = made_pages.html("a", runs, make)  # takes 10 s, so 100 s must pass
    append_metrics(root / "digen/a" / METRICS, 5, {"val/reward": 0.5})
    found = [made_pages.html("a", runs, make)[0] == first for _ in range(12)]
    assert found == [True] * 9 + [False] * 3 and len(made) == 2


def test_a_page_may_be_asked_for_while_another_thread_takes_its_place():
    clear: list[Callable[[], None]] = [lambda: None]
    made_pages = Pages(now_s=lambda: clear[0]() or 0.0)
    clear[0] = made_pages._made.clear
    made_pages._made["a"] = "etag", "html", 9.0
    assert made_pages.etag("a", {}) == "etag" and not made_pages._made


def test_a_run_that_is_removed_or_broken_is_told(root, monkeypatch):
    monkeypatch.setattr(pages, "MAX_SHARE", 1e9)
    client = Browser(root)
    (root / "digen/b & c" / METRICS).write_text("nonsense\n")
    assert client.get("/run", params={"name": "digen/b & c"}).status_code == 503
    [broken] = data_of(client.get("/").text)["broken"]
    assert broken.startswith("digen/b & c cannot be read: ") and "delete that line" in broken
    shutil.rmtree(root / "digen")
    answer = client.get("/run?name=digen/a")
    assert answer.status_code == 404 and "there is no run 'digen/a' below" in answer.text
    assert "No run below" in data_of(client.get("/").text)["missing"]["empty"]["runs"]


def test_the_next_free_port_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with free_port("127.0.0.1", port) as other:
            assert port < other.getsockname()[1] < port + 20
        monkeypatch.setattr("verl_digen.tools.watch.command.MAX_TRIES", 1)
        with pytest.raises(ValueError, match=f"--host and --port must be free, got 127.0.0.1:{port} "):
            free_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nowhere"], "FOLDER must be a folder with runs, got 'nowhere'"), ([".", "--port", "0"], "--port must lie in")],
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", *words]) == 2 and said in capsys.readouterr().err


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """`digen watch` of two runs -> (folder, its address)."""
    monkeypatch.setattr(pages, "MAX_SHARE", 1e9)  # a page may be made again at once
    for name in ("a", "b"):
        make_run(tmp_path / name)
    place = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(tmp_path), log_level="warning"))
    thread = threading.Thread(target=server.run, args=([place],))
    thread.start()
    yield tmp_path, f"http://localhost:{place.getsockname()[1]}/"
    server.should_exit = True
    thread.join(30)


@needs_chromium
def test_runs_are_chosen_from_the_list_and_laid_over_each_other(watched):
    with opened(watched[1], size=(390, 844)) as page:
        assert page.run("[...document.querySelectorAll('.wide')].map((one) => one.scrollWidth - one.clientWidth)") == [
            0
        ], "a phone shows a run without scrolling sideways"
        page.run("document.querySelectorAll('input[type=checkbox]').forEach((tick) => tick.click())")
        go = "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Compare 2')"
        page.follow(f"{go}.click()")
        assert page.run("document.querySelectorAll('.js-plotly-plot').length") == 3
        assert page.run("document.querySelectorAll('#pictures img').length") == 6
        against = "document.querySelector('#reward select')"
        page.run(f"{against}.value = 'perf/samples'; {against}.dispatchEvent(new Event('change'))")
        assert page.run("document.querySelector('#reward .xtitle').textContent") == "samples"
        page.follow("document.querySelector('a.name').click()")
        assert page.run("document.querySelector('h1').textContent") == "b", "the newest"
        assert not page.errors


@needs_chromium
def test_an_open_report_shows_a_new_step_and_keeps_what_was_chosen(watched):
    root, address = watched
    with opened(f"{address}run?name=a") as page:
        # the page looks for a change when it is asked to, not by its clock between two of the lines below
        page.call("Page.addScriptToEvaluateOnNewDocument", source="window.setInterval = () => 0")
        page.visit(f"{address}run?name=a")
        said = "document.querySelector('#pictures output').textContent"
        slider, metric = "document.querySelector('#pictures input')", "document.querySelector('#metrics select')"
        assert page.run(said) == "step 4"
        page.run(f"{slider}.value = 1; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        page.run(f"{metric}.value = 'reward/std'; {metric}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        page.run("scrollTo({top: 500, behavior: 'instant'})")
        append_metrics(root / "a" / METRICS, 5, metrics_of(5))
        add_validation(root / "a", 5)
        page.follow("document.dispatchEvent(new Event('visibilitychange'))")
        assert page.run(said) == "step 2" and page.run(f"{slider}.max") == "3"
        assert page.run(f"{metric}.value") == "reward/std" and page.run("scrollY") == 500
        assert page.run("columns.step.at(-1)") == 5 and not page.errors
