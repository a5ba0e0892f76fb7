"""The report of a large study: its size, how fast a browser opens it, what axe finds.

    python benchmarks/report.py [--trials 1000] [--opens 5]

Needs Chromium on the machine and the packages of the `dev` extra. Prints one JSON summary; times
are those of the fastest opening, and processor time is that of the page's own thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from headless import chromium, open_seconds
from synthetic_study import make_records, make_study

from tuner.report import study_report, write_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--opens", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = make_study(Path(folder) / "study", make_records(arguments.trials))
        page = directory.path / "report.html"
        write_page(study_report(directory.path), page)
        summary = {
            "command": f"python benchmarks/report.py --trials {arguments.trials}",
            "trials": arguments.trials,
            "bytes": page.stat().st_size,
            **measured(page, arguments.opens),
        }
    print(json.dumps(summary, indent=2))


def measured(page: Path, opens: int) -> dict[str, Any]:
    """Seconds to open the page, requests to a network, console messages, axe violations."""
    from axe_playwright_python.sync_playwright import Axe

    asked: list[str] = []
    complaints: list[str] = []
    with chromium() as browser:
        times = [open_seconds(browser, page) for _ in range(opens)]
        opened = browser.new_page()
        opened.set_default_timeout(300_000)
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("console", lambda message: complaints.append(message.text))
        opened.goto(page.as_uri(), wait_until="load")
        violations = Axe().run(opened).violations_count
    return {
        "open_wall_s": min(one["wall_s"] for one in times),
        "open_processor_s": min(one["processor_s"] for one in times),
        "network_requests": len([url for url in asked if url.startswith(("http", "ws"))]),
        "console_messages": len(complaints),
        "axe_violations": violations,
    }


if __name__ == "__main__":
    main()
