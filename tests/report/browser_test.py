#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: `browser_test.py REPORT SAMPLE`. Returns 77, with a message, where there is none.

Needs Debian's chromium, chromium-driver and python3-selenium.
"""
import base64
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
HOSTILE = ["</script><script>document.title='broken'</script>",
           "<img src=x onerror=\"document.title='broken'\">", "a'b\"c&amp;<b>=,:"]

# Contrast of every text with what lies behind it: [ratio, text, colour, background] of the worst ones.
CONTRAST = """
const rgb = c => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const light = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                     return .2126 * r + .7152 * g + .0722 * b; };
const behind = e => {
  for (const rect of e.matches('g > text') ? e.parentNode.querySelectorAll('rect') : []) {
    const fill = getComputedStyle(rect).fill;
    if (fill !== 'none' && rgb(fill)[3] === 1) return fill;
  }
  for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (rgb(c)[3] === 1) return c;
    if (rgb(c)[3] !== 0) throw Error('half transparent');
  }
  return 'rgb(255, 255, 255)';
};
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const e = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || e.closest('script, style, noscript, title, option') ||
      !e.getClientRects().length) continue;
  const style = getComputedStyle(e), colour = e.namespaceURI.includes('svg') ? style.fill : style.color;
  if (style.opacity !== '1') throw Error('not opaque');
  const back = behind(e), [a, b] = [light(rgb(colour)), light(rgb(back))];
  found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), walk.currentNode.data, colour, back]);
}
return [found.length, found.sort((a, b) => a[0] - b[0]).slice(0, 3)];
"""

# For every figure: marks whose place, or printed number, is not what the table says.
MARKS = """
const value = text => Number(text.replace('\\u2212', '-').match(/-?[\\d.]+/)[0]);
const result = [];
for (const figure of document.querySelectorAll('figure.chart')) {
  const cell = key => {
    const found = figure.querySelectorAll('td[data-key="' + key + '"]');
    if (found.length !== 1) throw Error(found.length + ' cells of ' + key);
    return value(found[0].textContent);
  };
  const wrong = [];
  let marks = 0;
  for (const m of figure.querySelectorAll('svg [data-key]')) {
    ++marks;
    const key = m.dataset.key;
    if (m.tagName === 'g') {  // a cell with its number
      if (Math.abs(value(m.querySelector('text').textContent) - cell(key)) > .5) wrong.push(key);
    } else if (figure.dataset.chart === 'kept') {  // bars, a token each
      const sum = [...m.getAttribute('d').matchAll(/h(\\d+)v/g)].reduce((s, r) => s + Number(r[1]), 0);
      if (sum !== cell(key)) wrong.push(key + ' ' + sum);
    } else {  // a place on both axes
      const ticks = name => [...m.ownerSVGElement.querySelectorAll('text.tick.' + name)]
          .map(t => [Number(t.getAttribute(name)) - (name === 'y' ? 4 : 0), value(t.textContent)]);
      const at = m.getAttribute('transform').match(/[\\d.]+/g).map(Number);
      for (const [axis, name, cell_key] of [[0, 'x', key.replace(/[st]$/, '') + 'x'], [1, 'y', key]]) {
        const t = ticks(name), [p, v] = t[0], [q, w] = t[t.length - 1];
        const expected = p + (cell(cell_key) - v) / (w - v) * (q - p);
        if (Math.abs(expected - at[axis]) > 1) wrong.push(key + ' ' + name + ' ' + at[axis] + ' not ' + expected);
      }
    }
  }
  result.push([figure.dataset.chart, marks, figure.querySelectorAll('tbody tr').length, wrong]);
}
return result;
"""


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


try:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    skip("there is no python3-selenium")

failures = []


def check(ok, what, *values):
    print(("ok      " if ok else "FAILED  ") + what, *values if not ok else ())
    if not ok:
        failures.append(what)


def results(sample):
    """The sample with hostile names, and lines of the other programs."""
    lines = []
    for line in map(json.loads, pathlib.Path(sample).read_text().splitlines()):
        if line.get("policy") == "streaming":
            line["policy"] = HOSTILE[0]
        if line.get("policy") == "snapkv":
            line["policy"] = HOSTILE[1]
        if line["kind"] == "tokens":
            line["texts"][3], line["texts"][4] = HOSTILE[0], HOSTILE[1]
        if line.get("task") == "needle_word":
            line["task"] = HOSTILE[2]
        if line.get("prompt") == "needle_number-24-0":
            line["prompt"] = HOSTILE[0]
        lines.append(line)
    for i, (policy, size) in enumerate([("full", 8), (HOSTILE[1], 60), ("page:budget=224", 64)]):
        lines.append({"kind": "batch", "policy": policy, "streams_at_once": size, "requests": 64,
                      "done": 64 - i, "tokens_per_s": 31.25 * (i + 1), "bytes": {"sum": 8.5e8 + 1e8 * i}})
    lines.append({"kind": HOSTILE[1]})
    for policy, most in [("full", 1000), (HOSTILE[0], 17)]:
        lines.append({"kind": "generate", "policy": policy, "page_bytes": 737280})
        for seen in range(1, 400):
            lines.append({"kind": "generate_token", "seen": seen, "pages": min(most, seen // 16 + 1)})
    return "".join(json.dumps(line) + "\n" for line in lines)


def start():
    options = Options()
    for argument in ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]:
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def media(browser, media_type="", **features):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "media": media_type,
        "features": [{"name": "prefers-" + name.replace("_", "-"), "value": value}
                     for name, value in features.items()]})


def width(browser, pixels):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": pixels, "height": 800, "deviceScaleFactor": 1, "mobile": pixels < 500})


def sideways(browser, pixels):
    """How wide the page is, and the window."""
    width(browser, pixels)
    return browser.execute_script(
        "return [document.documentElement.scrollWidth, innerWidth]")


def test(browser, page):
    run = browser.execute_script
    width(browser, 1100)
    media(browser, color_scheme="light")
    browser.get(page.as_uri())

    title = browser.title
    check(title == "What the model still knows", "no string from a file ran", title)
    check(run("return document.images.length") == 0, "no string from a file became an element")
    check(run("return [...document.scripts].length") == 2, "two scripts: the data and the program")
    text = run("return document.body.textContent")
    for hostile in HOSTILE:
        check(hostile in text, f"stays text: {hostile}")
    check(run("return performance.getEntriesByType('resource').length") == 0, "nothing is loaded")

    figures = run(MARKS)
    kinds = {kind for kind, *_ in figures}
    check(kinds == {"quality", "compare", "heat", "perplexity", "kept", "batch", "trace"}, "all charts", kinds)
    for kind, marks, rows, wrong in figures:
        check(marks > 0 and rows > 0, f"{kind}: {marks} marks, {rows} rows of its table")
        check(not wrong, f"{kind}: marks are where the table says", wrong[:3])

    # The sliders.
    run("document.querySelectorAll('details').forEach(d => d.open = true)")
    picture = "return [...document.querySelectorAll('#kept-strips path')].map(p => p.getAttribute('d')).join()"
    painted = "return [...document.querySelectorAll('#kept-text .on')].map(s => s.textContent).join('|')"
    for name in ["layer", "head"]:
        slider = browser.find_element(By.ID, f"kept-{name}")
        label = run("return arguments[0].labels[0].textContent", slider)
        check(label.strip() != "" and slider.accessible_name != "", f"slider {name}: is labelled", label)
        before = [run(picture), run(painted), browser.find_element(By.ID, "kept-status").text]
        slider.send_keys(Keys.ARROW_RIGHT)
        after = [run(picture), run(painted), browser.find_element(By.ID, "kept-status").text]
        check(slider.get_attribute("value") == "2", f"slider {name}: moves by an arrow key")
        for what, old, new in zip(["picture", "painted text", "words"], before, after):
            check(old != new, f"slider {name}: changes the {what}", old)
        wrong = [w for kind, _, _, w in run(MARKS) if kind == "kept"][0]
        check(not wrong, f"slider {name}: the table follows", wrong)
        slider.send_keys(Keys.ARROW_LEFT)
        check(run(picture) == before[0], f"slider {name}: and back")

    # Colour is never alone.
    check(run("""return [...document.querySelectorAll('figure')].every(f => {
      const forms = css => new Set([...f.querySelectorAll('path.m.' + css)].map(p => p.getAttribute('d')));
      const a = forms('a'), b = forms('b');
      return [...a].every(d => !b.has(d)); })"""), "series differ in shape")
    check(run("""return new Set([...document.querySelectorAll('[data-chart=batch] .panel:first-child path.m')]
      .map(p => p.getAttribute('d'))).size""") == 3, "policies of batch differ in shape")
    check(run("""return [...document.querySelectorAll('.cmp')].every(g => { const t = g.querySelector('text').textContent;
      return g.matches('.more') ? t[0] === '+' : g.matches('.less') ? t[0] === '\\u2212' : true; })"""),
          "better and worse differ in sign")

    for scheme in ["light", "dark"]:
        media(browser, color_scheme=scheme, reduced_motion="reduce")  # colours that are still fading are neither
        count, worst = run(CONTRAST)
        check(count > 200 and worst[0][0] >= 4.5, f"contrast, {scheme}, {count} texts: {worst[0][0]:.2f}", worst)
    media(browser, color_scheme="dark")
    dark = run("return getComputedStyle(document.body).backgroundColor")
    media(browser, color_scheme="light")
    check(dark != run("return getComputedStyle(document.body).backgroundColor"), "dark is not light")

    moving = "return getComputedStyle(document.querySelector('.tok')).transitionDuration"
    check(run(moving) != "0s", "colours fade")
    media(browser, reduced_motion="reduce")
    check(run(moving) == "0s", "but not with prefers-reduced-motion", run(moving))
    media(browser)

    for pixels in [375, 1100]:
        scroll, inner = sideways(browser, pixels)
        check(scroll <= pixels and inner == pixels, f"no sideways scroll at {pixels} px, all open", scroll, inner)
    browser.refresh()
    scroll, inner = sideways(browser, 375)
    check(scroll <= 375 and inner == 375, "no sideways scroll at 375 px, as it opens", scroll, inner)
    width(browser, 1100)

    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    check(pdf[:5] == b"%PDF-" and len(pdf) > 50000 and pdf.count(b"/Type /Page\n") > 3,
          f"printed: {len(pdf)} bytes, {pdf.count(b'/Type /Page' + bytes([10]))} pages")
    check(run("return document.querySelectorAll('details.data[open]').length") == 0,
          "what printing opens is closed again")

    log = browser.get_log("browser")
    check(not log, "the console is empty", log)


def main():
    report, sample = sys.argv[1:3]
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        skip("there is no chromium, or no chromedriver")
    with tempfile.TemporaryDirectory() as folder:
        data, page = pathlib.Path(folder) / "results.jsonl", pathlib.Path(folder) / "report.html"
        data.write_text(results(sample))
        subprocess.run([report, "--results", data, "--out", page], check=True)
        check(page.stat().st_size <= 3_000_000, "at most 3 MB")
        browser = start()
        try:
            test(browser, page)
        finally:
            browser.quit()
    print(f"{len(failures)} failed" if failures else "all passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
