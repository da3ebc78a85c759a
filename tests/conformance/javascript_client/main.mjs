// Runs scenarios with one release of the JavaScript SDK and tells the outcome of each as one line of JSON.
//
//     node main.mjs --package FOLDER [--record] SCENARIO...
//
// Outcomes and the last line of a recorded run are those of the Python client's script.

import { Recorder } from './recorder.mjs'
import { scenarios as commands } from './commands.mjs'
import { scenarios as files } from './files.mjs'
import { scenarios as interpreter } from './interpreter.mjs'
import { scenarios as sandboxes } from './sandboxes.mjs'
import { Absent, loadSdk } from './support.mjs'

const SCENARIOS = { ...commands, ...files, ...interpreter, ...sandboxes }

async function outcomeOf(name, sdk) {
  const began = performance.now()
  let outcome = 'pass'
  let detail = ''
  try {
    if (!(name in SCENARIOS)) throw new Absent('not part of this client')
    await SCENARIOS[name](sdk)
  } catch (error) {
    outcome = error instanceof Absent ? 'absent' : 'fail'
    detail = error instanceof Absent ? error.message : String(error?.stack ?? error).slice(-3000)
  }
  return { scenario: name, outcome, detail, took_ms: Math.round(performance.now() - began) }
}

const given = process.argv.slice(2)
const record = given.includes('--record')
const folder = given[given.indexOf('--package') + 1]
const names = given.filter((word, index) => !word.startsWith('--') && given[index - 1] !== '--package')
const sdk = await loadSdk(folder)
const recorder = record ? new Recorder(sdk) : null
for (const name of names) console.log(JSON.stringify(await outcomeOf(name, sdk)))
if (recorder) console.log(JSON.stringify(recorder.stop()))
process.exit(0)
