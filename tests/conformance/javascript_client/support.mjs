// What every scenario needs: the SDK under test, checks, patience. Node.js only, no packages but the SDK itself.

import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import path from 'node:path'
import { pathToFileURL } from 'node:url'

export const PATIENCE_MS = 60_000 // for what must come, on a machine that may be busy

export class Absent extends Error {} // this release has no such call

/** The SDK in `folder` (its place in node_modules), its version, and the text of its declarations. */
export async function loadSdk(folder) {
  const about = JSON.parse(readFileSync(path.join(folder, 'package.json'), 'utf8'))
  const e2b = await import(pathToFileURL(path.join(folder, about.module)).href)
  const declarations = readFileSync(path.join(folder, about.types), 'utf8')
  const version = about.version.split('.').map(Number)
  return { e2b, declarations, atLeast: (major, minor) => version[0] > major || (version[0] === major && version[1] >= minor) }
}

export function need(owner, name) {
  if (!(name in owner)) throw new Absent(`no ${name}`)
  return owner[name]
}

export async function eventually(probe, what) {
  const end = Date.now() + PATIENCE_MS
  for (;;) {
    const found = await probe()
    if (found) return found
    assert.ok(Date.now() < end, `not within ${PATIENCE_MS} ms: ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 200))
  }
}

/** The error that `call` ends with; it must be of `kind`. */
export async function raises(kind, call) {
  let result
  try {
    result = await call()
  } catch (error) {
    assert.ok(error instanceof kind, `expected ${kind.name}, got ${error?.stack}`)
    return error
  }
  assert.fail(`expected ${kind.name}, got ${JSON.stringify(result)}`)
}

/** A sandbox for the length of `use`. */
export async function withSandbox(e2b, options, use) {
  const { template = 'base', ...more } = options
  const sandbox = await e2b.Sandbox.create(template, { timeoutMs: 300_000, ...more })
  try {
    return await use(sandbox)
  } finally {
    await sandbox.kill()
  }
}

export async function pages(paginator) {
  const found = []
  while (paginator.hasNext) {
    found.push(await paginator.nextItems())
    assert.ok(found.length < 100, 'the pages do not end')
  }
  return found
}
