// SPDX-License-Identifier: Apache-2.0
'use strict';
// What needs a script: the picture of what was kept, and tables that are open on paper. Texts are only ever set as text.

addEventListener('beforeprint', () => {
  for (const d of document.querySelectorAll('details:not([open])')) {
    d.open = true;
    d.dataset.opened = '';
  }
});
addEventListener('afterprint', () => {
  for (const d of document.querySelectorAll('details[data-opened]')) {
    d.open = false;
    delete d.dataset.opened;
  }
});

(() => {
  const source = document.getElementById('kept-data');
  if (!source) return;
  const prompts = JSON.parse(source.textContent);
  const part = (name) => document.getElementById('kept-' + name);
  const make = (tag, css, text) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const drawn = (tag, attributes) => {
    const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const choices = (select, names) => {
    const before = select.value;
    select.replaceChildren(...names.map((name) => {
      const option = make('option', '', name);
      option.value = name;
      return option;
    }));
    if (names.includes(before)) select.value = before;
  };
  const unique = (names) => [...new Set(names)];
  const shown = (count) => count.toLocaleString('en');

  // Bit i of a row in hexadecimal digits: digit i / 4, the highest bit first.
  const has = (row, i) => (parseInt(row[i >> 2], 16) >> (3 - (i & 3))) & 1;
  const marks = (row, n) => Array.from({length: n}, (_, i) => has(row, i) === 1);
  const count = (flags) => flags.reduce((sum, on) => sum + (on ? 1 : 0), 0);

  let prompt, runs, facts, spans;

  // Each prompt's own texts, sizes and policies.
  const pick_prompt = () => {
    prompt = prompts[Number(part('prompt').value)];
    facts = new Array(prompt.texts.length).fill(false);
    for (const [begin, end] of prompt.facts) facts.fill(true, begin, end);
    spans = prompt.texts.map((text, i) => make('span', facts[i] ? 'tok fact' : 'tok', text));
    part('text').replaceChildren(...spans);
    choices(part('size'), unique(prompt.runs.map((run) => run.size)));
    part('layer').max = prompt.runs[0].rows.length;
    part('head').max = prompt.runs[0].rows[0].length;
    pick_size();
  };
  const pick_size = () => {
    runs = prompt.runs.filter((run) => run.size === part('size').value);
    choices(part('policy'), runs.map((run) => run.policy));
    const n = prompt.texts.length;
    for (const run of runs) {
      const all = run.rows.flat();
      run.mean = all.reduce((sum, row) => sum + count(marks(row, n)), 0) / all.length;
    }
    draw();
  };

  const strip = (run, flags, index) => {
    const n = flags.length;
    const box = make('div', 'strip');
    const svg = drawn('svg', {
      viewBox: `0 0 ${n} 10`, preserveAspectRatio: 'none', role: 'img',
      'aria-label': `${run.policy}: ${count(flags)} of ${n} tokens kept`,
    });
    let d = '';
    for (let i = 0; i < n; ++i) {
      if (!flags[i]) continue;
      const begin = i;
      while (i < n && flags[i]) ++i;
      d += `M${begin},0h${i - begin}v10h-${i - begin}z`;
    }
    svg.append(drawn('path', {class: 'm', d, 'data-key': 'kept-' + index}));
    for (const [begin, end] of prompt.facts)
      svg.append(drawn('rect', {class: 'of', x: begin, y: 0, width: Math.max(1, end - begin), height: 10}));
    box.append(make('div', 'name', run.policy), svg,
               make('div', 'count', `${shown(count(flags))} of ${shown(n)}`));
    return box;
  };

  const draw = () => {
    const layer = Number(part('layer').value) - 1, head = Number(part('head').value) - 1;
    const n = prompt.texts.length;
    part('layer-is').value = `${layer + 1} of ${part('layer').max}`;
    part('head-is').value = `${head + 1} of ${part('head').max}`;
    const flags = runs.map((run) => marks(run.rows[layer][head], n));
    part('strips').replaceChildren(...runs.map((run, i) => strip(run, flags[i], i)));
    part('table').replaceChildren(...runs.map((run, i) => {
      const row = make('tr');
      const name = make('th', '', run.policy);
      name.scope = 'row';
      const here = make('td', '', String(count(flags[i])));
      here.dataset.key = 'kept-' + i;
      row.append(name, here, make('td', '', String(n)),
                 make('td', '', `${count(flags[i].filter((_, t) => facts[t]))} of ${count(facts)}`),
                 make('td', '', run.mean.toFixed(1)));
      return row;
    }));
    const painted = Math.max(0, runs.findIndex((run) => run.policy === part('policy').value));
    spans.forEach((span, i) => span.classList.toggle('on', flags[painted][i]));
    part('status').textContent =
      `${runs[painted].policy}, layer ${layer + 1}, KV head ${head + 1}: ` +
      `${shown(count(flags[painted]))} of ${shown(n)} tokens kept, ` +
      `${count(flags[painted].filter((_, t) => facts[t]))} of the fact's ${count(facts)}.`;
  };

  part('prompt').replaceChildren(...prompts.map((p, i) => {
    const option = make('option', '', `${p.prompt} (${p.question})`);
    option.value = i;
    return option;
  }));
  part('prompt').addEventListener('change', pick_prompt);
  part('size').addEventListener('change', pick_size);
  for (const name of ['policy', 'layer', 'head']) part(name).addEventListener('input', draw);
  pick_prompt();
})();
