// Scenarios about commands and terminals.

import assert from 'node:assert/strict'
import { eventually, need, raises, withSandbox } from './support.mjs'

const bytes = (text) => new TextEncoder().encode(text)

async function commandResult({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    const { commands } = sandbox
    const done = await commands.run("echo out; echo 'fëhler' >&2")
    assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['out\n', 'fëhler\n', 0])
    const failed = await raises(e2b.CommandExitError, () => commands.run('echo some; echo why >&2; exit 7'))
    assert.deepEqual([failed.exitCode, failed.stdout, failed.stderr], [7, 'some\n', 'why\n'])
    assert.equal((await commands.run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
    assert.equal((await commands.run('whoami', { user: 'root' })).stdout, 'root\n')
    assert.equal((await commands.run('printf %s "$A"', { envs: { A: '1 ü' } })).stdout, '1 ü')
    let seen = ''
    await commands.run('echo one; echo two >&2', { onStdout: (text) => { seen += text }, onStderr: (text) => { seen += text } })
    assert.deepEqual(seen.trim().split('\n').sort(), ['one', 'two'])
    await raises(Error, () => commands.run('true', { cwd: '/no/such/folder' }))
  })
}

async function backgroundCommand({ e2b }) {
  await withSandbox(e2b, {}, async ({ commands }) => {
    const handle = await commands.run('echo started; sleep 0.3; echo later; exit 3', { background: true })
    const error = await raises(e2b.CommandExitError, () => handle.wait())
    assert.deepEqual([error.exitCode, error.stdout], [3, 'started\nlater\n'])
    const sleeper = await commands.run('echo up; exec sleep 300', { background: true, timeoutMs: 0 })
    const listed = (await commands.list()).find((process) => process.pid === sleeper.pid)
    assert.ok(listed.args.join(' ').includes('sleep 300'))
    await eventually(() => sleeper.stdout === 'up\n', 'the output so far')
    assert.deepEqual([sleeper.stderr, sleeper.exitCode, sleeper.error], ['', undefined, undefined])
    assert.equal(await commands.kill(sleeper.pid), true)
    await raises(e2b.CommandExitError, () => sleeper.wait())
    assert.equal(await commands.kill(sleeper.pid), false)
    const other = await commands.run('exec sleep 300', { background: true, timeoutMs: 0 })
    assert.equal(await other.kill(), true)
    await raises(e2b.CommandExitError, () => other.wait())
  })
}

async function standardInput({ e2b }) {
  await withSandbox(e2b, {}, async ({ commands }) => {
    const reader = await commands.run('read a; read b; echo got $a $b', { background: true, stdin: true })
    await commands.sendStdin(reader.pid, 'first\nsec')
    await commands.sendStdin(reader.pid, 'ond\n')
    assert.equal((await reader.wait()).stdout, 'got first second\n')
    assert.equal((await commands.run('cat; echo end')).stdout, 'end\n')
    need(commands, 'closeStdin')
    assert.equal(commands.supportsStdinClose, true)
    const counter = await commands.run('wc -c', { background: true, stdin: true })
    await commands.sendStdin(counter.pid, 'six by')
    await commands.closeStdin(counter.pid)
    assert.equal((await counter.wait()).stdout.trim(), '6')
    const byHandle = await commands.run('cat', { background: true, stdin: true })
    await byHandle.sendStdin(bytes('bytes\n'))
    await byHandle.closeStdin()
    assert.equal((await byHandle.wait()).stdout, 'bytes\n')
  })
}

async function reattach({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    const script = 'for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.3; done; exit 4'
    const first = await sandbox.commands.run(script, { background: true, timeoutMs: 0 })
    await first.disconnect()
    const other = await e2b.Sandbox.connect(sandbox.sandboxId)
    let seen = ''
    const again = await other.commands.connect(first.pid, { onStdout: (text) => { seen += text } })
    assert.equal((await raises(e2b.CommandExitError, () => again.wait())).exitCode, 4)
    assert.ok(seen.endsWith('9\n10\n'))
    await raises(Error, () => sandbox.commands.connect(999_999))
  })
}

async function commandTimeout({ e2b }) {
  await withSandbox(e2b, {}, async ({ commands }) => {
    await raises(e2b.TimeoutError, () => commands.run('sleep 20', { timeoutMs: 1000 }))
    assert.equal((await commands.run('echo still here')).stdout, 'still here\n')
  })
}

async function bigOutput({ e2b }) {
  await withSandbox(e2b, {}, async ({ commands }) => {
    const done = await commands.run("head -c 2000000 /dev/zero | tr '\\0' x; printf ä")
    assert.equal(done.stdout.length, 2_000_001)
    assert.ok(done.stdout.endsWith('xä'))
  })
}

async function environment({ e2b }) {
  await withSandbox(e2b, { envs: { COLOUR: 'blue', EMPTY: '' } }, async ({ commands, sandboxId }) => {
    assert.equal((await commands.run('printf %s "$COLOUR$EMPTY"')).stdout, 'blue')
    assert.equal((await commands.run('printf %s "$COLOUR"', { envs: { COLOUR: 'red' } })).stdout, 'red')
    assert.equal((await commands.run('printf %s "$E2B_SANDBOX $E2B_SANDBOX_ID"')).stdout, `true ${sandboxId.split('-')[0]}`)
  })
}

/** A terminal and the text it has shown. */
async function terminalOf(sandbox, options = {}, pid = undefined) {
  const screen = { text: '' }
  const onData = (data) => { screen.text += new TextDecoder().decode(data) }
  screen.handle = pid === undefined
    ? await sandbox.pty.create({ cols: 80, rows: 24, onData, ...options })
    : await sandbox.pty.connect(pid, { onData, ...options })
  return screen
}

async function terminal({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    const screen = await terminalOf(sandbox, { envs: { MARK: 'here' }, cwd: '/tmp' })
    const { pid } = screen.handle
    await sandbox.pty.sendInput(pid, bytes('echo "$MARK in $(pwd)"\n'))
    await sandbox.pty.resize(pid, { cols: 132, rows: 43 })
    await sandbox.pty.sendInput(pid, bytes('echo now $(stty size); exit\n'))
    assert.equal((await screen.handle.wait()).exitCode, 0)
    assert.ok(screen.text.includes('here in /tmp'), screen.text)
    assert.ok(screen.text.includes('now 43 132'), screen.text)
    const killed = await terminalOf(sandbox, { timeoutMs: 0 })
    assert.equal(await sandbox.pty.kill(killed.handle.pid), true)
    await raises(e2b.CommandExitError, () => killed.handle.wait())
    assert.equal(await sandbox.pty.kill(killed.handle.pid), false)
  })
}

async function terminalReattach({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    need(sandbox.pty, 'connect')
    const first = await terminalOf(sandbox, { timeoutMs: 0 })
    await sandbox.pty.sendInput(first.handle.pid, bytes('kept=yes\n'))
    await first.handle.disconnect()
    const second = await terminalOf(sandbox, { timeoutMs: 0 }, first.handle.pid)
    await sandbox.pty.sendInput(second.handle.pid, bytes('echo "kept: $kept"; exit\n'))
    await second.handle.wait()
    assert.ok(second.text.includes('kept: yes'), second.text)
  })
}

async function killDuringCommand({ e2b }) {
  const sandbox = await e2b.Sandbox.create('base', { timeoutMs: 300_000 })
  const other = await e2b.Sandbox.connect(sandbox.sandboxId)
  let output = '' // shows that the stream stands: only then does its end tell of the kill
  const options = { timeoutMs: 0, onStdout: (text) => { output += text } }
  const waiting = sandbox.commands.run('echo up; sleep 120', options).then(() => null, (error) => error)
  await eventually(async () => output.includes('up'), 'the command runs')
  assert.equal(await other.kill(), true)
  const error = await waiting
  assert.ok(error instanceof e2b.TimeoutError, error?.stack)
  assert.ok(error.message.includes('sandbox was killed or reached its end of life'), error.message)
  assert.equal(await sandbox.isRunning(), false)
}

export const scenarios = {
  command_result: commandResult,
  background_command: backgroundCommand,
  standard_input: standardInput,
  reattach,
  command_timeout: commandTimeout,
  big_output: bigOutput,
  environment,
  terminal,
  terminal_reattach: terminalReattach,
  kill_during_command: killDuringCommand,
}
