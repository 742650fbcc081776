"""Runs fetch.js in headless Chromium, on a page of the router's own origin: browser.py BASE_URL BODY

Speaks WebDriver with chromedriver; prints what the page saw."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

base, body = sys.argv[1:]
here = pathlib.Path(__file__).parent
options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync", "--user-data-dir=" + tempfile.mkdtemp()]
driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
try:
    port = next(m[1] for m in (re.search(r"successfully on port (\d+)", line) for line in driver.stdout) if m)

    def call(path, arguments, method="POST"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(arguments).encode(), {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    session = call("/session", {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": {"args": options}}}})
    at = "/session/" + session["sessionId"]
    try:
        call(at + "/url", {"url": base + "/livez"})
        script = "const done = arguments[2]; " + (here / "fetch.js").read_text().strip() + "(arguments[0], arguments[1]).then((s) => done(s), (e) => done({error: String(e)}))"
        seen = call(at + "/execute/async", {"script": script, "args": ["", json.loads(body)]})
        seen["browser"] = session["capabilities"]["browserVersion"]
        print(json.dumps(seen))
    finally:
        call(at, {}, "DELETE")
finally:
    driver.terminate()
    driver.wait()
