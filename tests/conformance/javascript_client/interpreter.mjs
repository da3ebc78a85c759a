// Scenarios of the code interpreter's client, each in a sandbox of its own.

import assert from 'node:assert/strict'
import { need, raises, withSandbox } from './support.mjs'

const PATIENCE_MS = 180_000 // of one cell, in an emulated guest on a machine that may be busy
const CHARTS = {
  line: 'plt.plot([1, 2], [3, 4], label="a")',
  scatter: 'plt.scatter([1, 2], [3, 4], label="a")',
  bar: 'plt.bar(["p", "q"], [3, 4])',
  pie: 'plt.pie([1, 3], labels=["p", "q"])',
  box_and_whisker: 'plt.boxplot([[1, 2, 3, 4, 5]])',
  superchart: "figure, axes = plt.subplots(2); axes[0].plot([1, 2]); axes[1].bar(['p'], [1])",
}

const boxed = (e2b, use, options = {}) => withSandbox(e2b, { template: 'code-interpreter-v1', ...options }, use)
const run = (sandbox, code, options = {}) => sandbox.runCode(code, { timeoutMs: PATIENCE_MS, ...options })
const output = (execution) => execution.logs.stdout.join('')

async function results({ e2b }) {
  await boxed(e2b, async (sandbox) => {
    const first = await run(sandbox, "x = 20\nprint('out')\nx + 1")
    assert.deepEqual([first.text, output(first), first.error], ['21', 'out\n', undefined])
    assert.deepEqual(first.results.map((result) => result.isMainResult), [true])
    const second = await run(sandbox, 'x')
    assert.deepEqual([second.text, second.executionCount], ['20', first.executionCount + 1])
    const [table] = (await run(sandbox, 'import pandas as pd; pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})')).results
    assert.deepEqual(table.data, { a: [1, 2], b: ['x', 'y'] })
    assert.ok(table.html.includes('<table'))
    const code = 'from IPython.display import HTML, Markdown, JSON\ndisplay(HTML("<b>b</b>"))\ndisplay(Markdown("# t"))\ndisplay(JSON({"a": [1]}))'
    const shown = (await run(sandbox, code)).results
    assert.deepEqual([shown[0].html, shown[1].markdown, shown[2].json], ['<b>b</b>', '# t', { a: [1] }])
    assert.deepEqual((await run(sandbox, 'None')).results, [])
  })
}

async function charts({ e2b }) {
  await boxed(e2b, async (sandbox) => {
    for (const [kind, draw] of Object.entries(CHARTS)) {
      const [result] = (await run(sandbox, `import matplotlib.pyplot as plt\n${draw}\nplt.title('t')\nplt.show()`)).results
      assert.ok(result.png.startsWith('iVBOR'), kind)
      assert.equal(result.chart.type, kind)
      assert.equal(result.chart.elements.length, { bar: 2, pie: 2, superchart: 2 }[kind] ?? 1, kind)
    }
    const [again] = (await run(sandbox, "plt.plot([1, 2], [3, 4], label='a')\nplt.show()")).results
    assert.deepEqual(again.chart.elements[0].points, [[1, 3], [2, 4]])
  })
}

async function languages({ e2b }) {
  await boxed(e2b, async (sandbox) => {
    assert.equal((await run(sandbox, 'import sys; sys.version_info.major', { language: 'python' })).text, '3')
    assert.equal((await run(sandbox, 'const a = [1]; a.concat(2)', { language: 'js' })).text, '[ 1, 2 ]')
    assert.equal(output(await run(sandbox, "console.log(await Promise.resolve('é'))", { language: 'javascript' })), 'é\n')
    assert.equal((await run(sandbox, 'const t: number = 2; t', { language: 'ts' })).text, '2')
    assert.equal(output(await run(sandbox, 'X=5; echo $X | tr 5 6', { language: 'bash' })), '6\n')
    await raises(e2b.SandboxError, () => run(sandbox, '1', { language: 'cobol' }))
  })
}

async function errors({ e2b }) {
  await boxed(e2b, async (sandbox) => {
    await run(sandbox, "kept = 'kept'")
    const { error } = await run(sandbox, 'def f():\n    return 1 / 0\nf()')
    assert.deepEqual([error.name, error.value], ['ZeroDivisionError', 'division by zero'])
    assert.ok(error.traceback.includes('return 1 / 0'))
    assert.equal((await run(sandbox, 'nope()', { language: 'js' })).error.name, 'ReferenceError')
    assert.equal((await run(sandbox, '(exit 3)', { language: 'bash' })).error.value, '3')
    assert.equal((await run(sandbox, 'kept')).text, 'kept') // without quotes, as the official server has it
  })
}

async function streaming({ e2b }) {
  const told = []
  await boxed(e2b, (sandbox) =>
    run(sandbox, "import sys\nfor n in range(3):\n    print(n)\nprint('bad', file=sys.stderr)\ndisplay(7)\n1/0", {
      onStdout: (message) => void told.push(['out', message.line]),
      onStderr: (message) => void told.push(['err', message.line]),
      onResult: (result) => void told.push(['result', result.text]),
      onError: (error) => void told.push(['error', error.name]),
    }),
  )
  const text = (kind) => told.filter(([found]) => found === kind).map(([, line]) => line)
  assert.equal(text('out').join(''), '0\n1\n2\n')
  assert.equal(text('err').join(''), 'bad\n')
  assert.deepEqual([text('result'), text('error')], [['7'], ['ZeroDivisionError']])
}

async function contexts({ e2b }) {
  await boxed(e2b, async (sandbox) => {
    const context = await sandbox.createCodeContext({ cwd: '/tmp', language: 'python' })
    assert.deepEqual([context.language, context.cwd], ['python', '/tmp'])
    assert.equal(output(await run(sandbox, 'import os; mine = 1; print(os.getcwd())', { context })), '/tmp\n')
    assert.equal((await run(sandbox, 'mine')).error.name, 'NameError')
    const ids = async () => (await need(sandbox, 'listCodeContexts').call(sandbox)).map((found) => found.id)
    assert.ok((await ids()).includes(context.id))
    await sandbox.restartCodeContext(context)
    assert.equal((await run(sandbox, 'mine', { context })).error.name, 'NameError')
    await sandbox.removeCodeContext(context)
    assert.equal((await ids()).includes(context.id), false)
    await raises(e2b.SandboxError, () => run(sandbox, '1', { context }))
  })
}

async function variables({ e2b }) {
  const read = {
    python: "import os; print(os.environ.get('A'), os.environ.get('B'))",
    js: "console.log(process.env.A ?? 'None', process.env.B ?? 'None')",
    bash: 'echo ${A-None} ${B-None}',
  }
  const use = async (sandbox) => {
    for (const [language, code] of Object.entries(read)) {
      assert.equal(output(await run(sandbox, code, { language })), 'wide None\n', language)
      assert.equal(output(await run(sandbox, code, { language, envs: { A: 'mine', B: 'once' } })), 'mine once\n', language)
      assert.equal(output(await run(sandbox, code, { language })), 'wide None\n', language)
    }
  }
  await boxed(e2b, use, { envs: { A: 'wide' } })
}

async function timeout({ e2b }) {
  await boxed(e2b, async (sandbox) => {
    await run(sandbox, 'kept = 1')
    await raises(e2b.TimeoutError, () => run(sandbox, 'import time; time.sleep(1000)', { timeoutMs: 3000 }))
    assert.equal((await run(sandbox, 'kept')).text, '1')
  })
}

async function lives({ e2b }) {
  await boxed(e2b, async (sandbox) => {
    await run(sandbox, "kept = ['kept']")
    await sandbox.pause()
    const resumed = await e2b.Sandbox.connect(sandbox.sandboxId)
    assert.equal((await run(resumed, "kept.append('again'); kept")).text, "['kept', 'again']")
    const [child] = await need(resumed, 'fork').call(resumed)
    try {
      const other = await e2b.Sandbox.connect(child.sandboxId)
      assert.equal((await run(other, "kept.append('child'); kept")).text, "['kept', 'again', 'child']")
    } finally {
      await child.kill()
    }
    assert.equal((await run(resumed, 'kept')).text, "['kept', 'again']")
  })
}

export const scenarios = {
  code_results: results,
  code_charts: charts,
  code_languages: languages,
  code_errors: errors,
  code_streaming: streaming,
  code_contexts: contexts,
  code_variables: variables,
  code_timeout: timeout,
  code_lives: lives,
}
