// Scenarios about the life of sandboxes and what stands beside them.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { Absent, eventually, need, pages, raises, withSandbox } from './support.mjs'

const BOOT_ID = '/proc/sys/kernel/random/boot_id'
const COUNTER = 'i=0; while :; do i=$((i+1)); echo $i > /tmp/.c; mv /tmp/.c /tmp/count; sleep 0.1; done'
const missing = (e2b) => e2b.SandboxNotFoundError ?? e2b.NotFoundError

async function createAndKill({ e2b }) {
  const sandbox = await e2b.Sandbox.create('base', { timeoutMs: 60_000 })
  assert.match(sandbox.sandboxId, /^[a-z0-9-]+$/)
  assert.equal(await sandbox.isRunning(), true)
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.isRunning(), false)
  assert.equal(await e2b.Sandbox.kill(sandbox.sandboxId), false)
  assert.equal(await e2b.Sandbox.kill('nonexistingsandbox'), false)
}

async function connect({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    await sandbox.files.write('/tmp/mark', 'here')
    const other = await e2b.Sandbox.connect(sandbox.sandboxId)
    assert.equal(await other.files.read('/tmp/mark'), 'here')
    const before = (await sandbox.getInfo()).endAt
    await sandbox.connect({ timeoutMs: 10_000 })
    assert.deepEqual((await sandbox.getInfo()).endAt, before)
    await e2b.Sandbox.connect(sandbox.sandboxId, { timeoutMs: 900_000 })
    assert.ok((await sandbox.getInfo()).endAt > before)
    await raises(missing(e2b), () => e2b.Sandbox.connect('nonexistingsandbox'))
  })
}

async function listAndFilter({ e2b }) {
  const mark = randomUUID()
  const made = []
  try {
    for (const number of [0, 1, 2]) made.push(await e2b.Sandbox.create('base', { metadata: { mark, 'odd key&=': `${number} ü/&=` } }))
    const ids = made.map((sandbox) => sandbox.sandboxId)
    const all = await pages(e2b.Sandbox.list({ query: { metadata: { mark } }, limit: 2 }))
    assert.deepEqual(all.map((page) => page.length), [2, 1])
    assert.deepEqual(all.flat().map((info) => info.sandboxId), ids.toReversed())
    const [one] = await pages(e2b.Sandbox.list({ query: { metadata: { mark, 'odd key&=': '1 ü/&=' } } }))
    assert.deepEqual(one.map((info) => info.sandboxId), [ids[1]])
    await made[0].pause()
    const [paused] = await pages(e2b.Sandbox.list({ query: { metadata: { mark }, state: ['paused'] } }))
    assert.deepEqual(paused.map((info) => info.sandboxId), [ids[0]])
  } finally {
    for (const sandbox of made) await sandbox.kill()
  }
}

async function details({ e2b }) {
  await withSandbox(e2b, { metadata: { 'a b': 'c&d' }, timeoutMs: 120_000 }, async (sandbox) => {
    const info = await sandbox.getInfo()
    assert.deepEqual([info.sandboxId, info.metadata, info.state], [sandbox.sandboxId, { 'a b': 'c&d' }, 'running'])
    assert.equal(info.endAt - info.startedAt, 120_000)
    assert.ok(info.cpuCount >= 1 && info.memoryMB >= 128 && info.envdVersion && info.templateId)
    assert.deepEqual((await e2b.Sandbox.getInfo(sandbox.sandboxId)).startedAt, info.startedAt)
    if ('getFullInfo' in e2b.Sandbox) assert.equal((await e2b.Sandbox.getFullInfo(sandbox.sandboxId)).sandboxId, sandbox.sandboxId)
    assert.ok(sandbox.getHost(8000).startsWith('8000-'))
    assert.ok(sandbox.getMcpUrl().includes(sandbox.sandboxId))
    await raises(e2b.NotFoundError, () => sandbox.getMcpToken())
    await raises(missing(e2b), () => e2b.Sandbox.getInfo('nonexistingsandbox'))
  })
}

async function setTimeoutOf({ e2b }) {
  await withSandbox(e2b, { timeoutMs: 600_000 }, async (sandbox) => {
    await sandbox.setTimeout(60_000)
    const info = await sandbox.getInfo()
    assert.ok(info.endAt - info.startedAt < 300_000)
    await e2b.Sandbox.setTimeout(sandbox.sandboxId, 1000)
    await eventually(async () => !(await sandbox.isRunning()), 'it ends at its timeout')
  })
}

async function pauseAndResume({ e2b }) {
  await withSandbox(e2b, { envs: { KEPT: 'yes' } }, async (sandbox) => {
    const bootId = await sandbox.files.read(BOOT_ID)
    const counter = await sandbox.commands.run(COUNTER, { background: true, timeoutMs: 0 })
    await eventually(() => sandbox.files.exists('/tmp/count'), 'the counter counts')
    assert.equal(await sandbox.pause(), true)
    assert.equal(await sandbox.isRunning(), false)
    assert.equal((await sandbox.getInfo()).state, 'paused')
    assert.equal(await e2b.Sandbox.pause(sandbox.sandboxId), false)
    const again = await e2b.Sandbox.connect(sandbox.sandboxId)
    assert.equal(await again.files.read(BOOT_ID), bootId)
    assert.ok((await again.commands.list()).some((process) => process.pid === counter.pid))
    assert.equal((await sandbox.commands.run('printf %s $KEPT')).stdout, 'yes')
    await sandbox.betaPause()
  })
}

async function pauseAtTimeout({ e2b }) {
  await withSandbox(e2b, { lifecycle: { onTimeout: 'pause' } }, async (sandbox) => {
    await sandbox.files.write('/tmp/mark', 'kept')
    await sandbox.setTimeout(0)
    await eventually(async () => (await sandbox.getInfo()).state === 'paused', 'it pauses at its timeout')
    assert.equal(await (await e2b.Sandbox.connect(sandbox.sandboxId)).files.read('/tmp/mark'), 'kept')
  })
}

async function autoResume({ e2b }) {
  await withSandbox(e2b, { lifecycle: { onTimeout: 'pause', autoResume: true } }, async (sandbox) => {
    await sandbox.files.write('/tmp/mark', 'kept')
    await sandbox.pause()
    assert.equal(await sandbox.files.read('/tmp/mark'), 'kept')
    assert.equal((await sandbox.getInfo()).state, 'running')
  })
}

async function pauseDiskOnly({ e2b, declarations }) {
  if (!declarations.includes('keepMemory')) throw new Absent('no option keepMemory')
  await withSandbox(e2b, {}, async (sandbox) => {
    await sandbox.files.write('/home/user/kept', 'on disk')
    const bootId = await sandbox.files.read(BOOT_ID)
    await sandbox.pause({ keepMemory: false })
    const again = await e2b.Sandbox.connect(sandbox.sandboxId)
    assert.equal(await again.files.read('/home/user/kept'), 'on disk')
    assert.notEqual(await again.files.read(BOOT_ID), bootId)
  })
}

async function fork({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    need(sandbox, 'fork')
    await sandbox.files.write('/tmp/mark', 'before')
    const children = await sandbox.fork({ count: 2, timeoutMs: 120_000 })
    try {
      for (const child of children) assert.equal(await child.files.read('/tmp/mark'), 'before')
      await children[0].files.write('/tmp/mark', 'mine')
      assert.equal(await children[1].files.read('/tmp/mark'), 'before')
    } finally {
      for (const child of children) await child.kill()
    }
    const [child] = await e2b.Sandbox.fork(sandbox.sandboxId, { timeoutMs: 60_000 })
    assert.equal(await child.kill(), true)
  })
}

async function metrics({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    const samples = await eventually(async () => {
      const found = await sandbox.getMetrics()
      return found.length > 0 && found
    }, 'a first sample')
    assert.ok(samples[0].cpuCount >= 1 && samples[0].memUsed > 0 && samples[0].diskTotal > 0)
    const past = new Date(Date.now() - 7_200_000)
    assert.deepEqual(await e2b.Sandbox.getMetrics(sandbox.sandboxId, { start: past, end: new Date(past.getTime() + 3_600_000) }), [])
  })
}

async function networkSettings({ e2b }) {
  const rules = { denyOut: ['0.0.0.0/0'], allowOut: ['198.51.100.7', '203.0.113.0/24'] }
  await withSandbox(e2b, { network: rules }, async (sandbox) => {
    const told = (await sandbox.getInfo()).network
    assert.deepEqual([told.denyOut, told.allowOut], [rules.denyOut, rules.allowOut])
    await sandbox.updateNetwork({ denyOut: ['192.0.2.0/24'] })
    assert.deepEqual((await sandbox.getInfo()).network.denyOut, ['192.0.2.0/24'])
    await raises(Error, () => sandbox.updateNetwork({ denyOut: ['example.org'] }))
    await raises(missing(e2b), () => e2b.Sandbox.updateNetwork('nonexistingsandbox', {}))
  })
}

async function errors({ e2b }) {
  await raises(e2b.AuthenticationError, () => e2b.Sandbox.create('base', { apiKey: `e2b_${'f'.repeat(40)}` }))
  const unknown = await raises(Error, () => e2b.Sandbox.create('no-such-template'))
  assert.ok(unknown.message.includes('no-such-template'))
  await withSandbox(e2b, {}, async (sandbox) => {
    await sandbox.kill()
    await raises(Error, () => sandbox.files.read('/etc/hostname'))
    await raises(missing(e2b), () => sandbox.setTimeout(10_000))
  })
}

async function ports({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    await sandbox.commands.run('exec python3 -m http.server 8000 --directory /etc', { background: true, timeoutMs: 0 })
    const get = (port) => fetch(`${process.env.E2B_SANDBOX_URL}/hostname`, { headers: { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': String(port) } })
    await eventually(async () => (await get(8000)).status === 200, 'the server in the sandbox answers')
    const closed = await get(8001)
    const body = { sandboxId: sandbox.sandboxId, message: 'The sandbox is running but port is not open', port: 8001, code: 502 }
    assert.deepEqual([closed.status, await closed.json()], [502, body])
  })
}

async function snapshot({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    need(sandbox, 'createSnapshot')
    await sandbox.files.write('/home/user/mark', 'in the snapshot')
    const taken = await sandbox.createSnapshot({ name: `conformance-${randomUUID().slice(0, 8)}` })
    try {
      await withSandbox(e2b, { template: taken.snapshotId }, async (child) => {
        assert.equal(await child.files.read('/home/user/mark'), 'in the snapshot')
      })
      const listed = (await pages(sandbox.listSnapshots())).flat()
      assert.ok(listed.some((found) => found.snapshotId === taken.snapshotId))
    } finally {
      assert.equal(await e2b.Sandbox.deleteSnapshot(taken.snapshotId), true)
    }
    assert.equal(await e2b.Sandbox.deleteSnapshot(taken.snapshotId), false)
  })
}

async function templates({ e2b }) {
  need(e2b.Template, 'exists')
  assert.equal(await e2b.Template.exists('base'), true)
  assert.equal(await e2b.Template.exists('no-such-template'), false)
}

async function volumes({ e2b }) {
  need(e2b, 'Volume')
  const volume = await e2b.Volume.create(`conformance-${randomUUID().slice(0, 8)}`)
  try {
    await volume.writeFile('/a.txt', 'from outside')
    await withSandbox(e2b, { volumeMounts: { '/mnt/shared': volume } }, async (sandbox) => {
      assert.equal((await sandbox.commands.run('cat /mnt/shared/a.txt', { user: 'root' })).stdout, 'from outside')
      await sandbox.commands.run('echo inside > /mnt/shared/b.txt', { user: 'root' })
    })
    assert.equal(await volume.readFile('/b.txt'), 'inside\n')
  } finally {
    assert.equal(await e2b.Volume.destroy(volume.volumeId), true)
  }
}

async function secrets({ e2b }) {
  need(e2b, 'Secret')
  const name = `conformance_${randomUUID().slice(0, 8)}`
  const made = await e2b.Secret.create(name, 'first value')
  assert.equal(JSON.stringify(made).includes('first value'), false)
  assert.equal(await e2b.Secret.exists(name), true)
  await e2b.Secret.update(name, 'second value')
  assert.equal(await e2b.Secret.destroy(name), true)
  assert.equal(await e2b.Secret.exists(name), false)
}

export const scenarios = {
  create_and_kill: createAndKill,
  connect,
  list_and_filter: listAndFilter,
  details,
  set_timeout: setTimeoutOf,
  pause_and_resume: pauseAndResume,
  pause_disk_only: pauseDiskOnly,
  pause_at_timeout: pauseAtTimeout,
  auto_resume: autoResume,
  fork,
  metrics,
  network_settings: networkSettings,
  ports,
  errors,
  snapshot,
  templates,
  volumes,
  secrets,
}
