// Scenarios about files, folders and git.

import assert from 'node:assert/strict'
import { eventually, need, raises, withSandbox } from './support.mjs'

const ODD_NAMES = ['a b', 'ü', '日本', '%2e%2e', 'a"b', 'a\\', "a'b", 'a#b?c&d=e', '-rf', '.hidden', 'x'.repeat(255)]

async function fileContents({ e2b }) {
  await withSandbox(e2b, {}, async ({ files, commands }) => {
    await files.write('/home/user/a/b/c.txt', 'grüße\n')
    assert.equal(await files.read('/home/user/a/b/c.txt'), 'grüße\n')
    const everyByte = Uint8Array.from({ length: 100_000 }, (_, index) => index % 256)
    await files.write('relative.bin', everyByte.buffer)
    assert.deepEqual(await files.read('/home/user/relative.bin', { format: 'bytes' }), everyByte)
    await files.write('blob.bin', new Blob([everyByte]))
    assert.equal((await files.read('blob.bin', { format: 'blob' })).size, everyByte.length)
    await files.write('stream.bin', new Blob([everyByte]).stream())
    const stream = await files.read('stream.bin', { format: 'stream' })
    let length = 0
    for await (const part of stream) length += part.length
    assert.equal(length, everyByte.length)
    await files.write('empty', '')
    assert.equal(await files.read('empty'), '')
    assert.equal((await commands.run('stat -c %U:%a relative.bin')).stdout, 'user:644\n')
    await raises(e2b.NotFoundError, () => files.read('/home/user/none'))
    assert.equal((await files.read('/proc/sys/kernel/random/boot_id')).length, 37)
    for (const name of ODD_NAMES) {
      await files.write(`/tmp/odd/${name}`, name)
      assert.equal(await files.read(`/tmp/odd/${name}`), name)
    }
  })
}

async function manyFiles({ e2b }) {
  await withSandbox(e2b, {}, async ({ files }) => {
    const entries = [0, 1, 2, 3].map((number) => ({ path: `/tmp/many/${number}/f.txt`, data: `number ${number}` }))
    const written = await ('writeFiles' in files ? files.writeFiles(entries) : files.write(entries))
    assert.deepEqual(written.map((entry) => entry.path).sort(), entries.map((entry) => entry.path))
    for (const { path, data } of entries) assert.equal(await files.read(path), data)
  })
}

async function fileTree({ e2b }) {
  await withSandbox(e2b, {}, async ({ files }) => {
    assert.equal(await files.makeDir('/tmp/tree/one/two'), true)
    assert.equal(await files.makeDir('/tmp/tree/one/two'), false)
    await files.write('/tmp/tree/f', 'x')
    const found = new Map((await files.list('/tmp/tree')).map((entry) => [entry.name, entry.type]))
    assert.deepEqual([found.get('one'), found.get('f'), found.size], [e2b.FileType.DIR, e2b.FileType.FILE, 2])
    const moved = await files.rename('/tmp/tree/f', '/tmp/tree/one/g')
    assert.deepEqual([moved.name, moved.path], ['g', '/tmp/tree/one/g'])
    assert.deepEqual([await files.exists('/tmp/tree/f'), await files.exists('/tmp/tree/one/g')], [false, true])
    assert.deepEqual((await files.list('/tmp/tree', { depth: 3 })).map((entry) => entry.name).sort(), ['g', 'one', 'two'])
    await files.remove('/tmp/tree/one')
    assert.equal(await files.exists('/tmp/tree/one/g'), false)
    await raises(e2b.NotFoundError, () => files.list('/tmp/none'))
  })
}

async function fileDetails({ e2b }) {
  await withSandbox(e2b, {}, async ({ files, commands }) => {
    await files.write('/tmp/d', '12345')
    await commands.run('chmod 640 /tmp/d; ln -s /tmp/d /tmp/link')
    const entry = await files.getInfo('/tmp/d')
    assert.deepEqual([entry.name, entry.size, entry.mode & 0o777, entry.owner, entry.permissions], ['d', 5, 0o640, 'user', '-rw-r-----'])
    assert.equal((await files.getInfo('/tmp/link')).symlinkTarget, '/tmp/d')
    await files.write('/tmp/tagged', 'x', { metadata: { kind: 'note' } })
    assert.deepEqual((await files.getInfo('/tmp/tagged')).metadata, { kind: 'note' })
    await raises(e2b.NotFoundError, () => files.getInfo('/tmp/none'))
  })
}

async function compressedFiles({ e2b }) {
  await withSandbox(e2b, {}, async ({ files }) => {
    const text = 'compress me '.repeat(20_000)
    await files.write('/tmp/z', text, { gzip: true })
    assert.equal(await files.read('/tmp/z'), text)
    assert.equal(await files.read('/tmp/z', { gzip: true }), text)
    await files.write('/tmp/octets', text, { useOctetStream: true })
    assert.equal(await files.read('/tmp/octets'), text)
  })
}

async function watchFolder({ e2b }) {
  await withSandbox(e2b, {}, async ({ files }) => {
    await files.makeDir('/tmp/watched')
    const seen = []
    const told = (name, type) => () => seen.some((event) => event.name === name && event.type === type)
    const handle = await files.watchDir('/tmp/watched', (event) => { seen.push(event) }, { recursive: true })
    await files.write('/tmp/watched/new', 'x')
    await eventually(told('new', e2b.FilesystemEventType.CREATE), 'the new file is told')
    await files.write('/tmp/watched/deep/er/file', 'x')
    await eventually(told('deep/er/file', e2b.FilesystemEventType.WRITE), 'the write in a new sub-folder is told')
    await files.remove('/tmp/watched/new')
    await eventually(told('new', e2b.FilesystemEventType.REMOVE), 'the removal is told')
    await handle.stop()
    await raises(e2b.NotFoundError, () => files.watchDir('/tmp/none', () => {}))
  })
}

async function fileUrls({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    await sandbox.files.write('/tmp/shared', 'by link')
    assert.equal(await (await fetch(await sandbox.downloadUrl('/tmp/shared'))).text(), 'by link')
    const upload = await sandbox.uploadUrl('/tmp/up', { useSignatureExpiration: 300 })
    const form = new FormData()
    form.append('file', new Blob(['uploaded']), 'x')
    assert.deepEqual(await (await fetch(upload, { method: 'POST', body: form })).json(), [{ name: 'up', path: '/tmp/up', type: 'file' }])
    assert.equal(await sandbox.files.read('/tmp/up'), 'uploaded')
    const expired = await fetch(await sandbox.downloadUrl('/tmp/shared', { useSignatureExpiration: -300 }))
    assert.deepEqual([expired.status, await expired.json()], [401, { code: 401, message: 'signature is already expired' }])
  })
}

async function git({ e2b }) {
  await withSandbox(e2b, {}, async (sandbox) => {
    const repo = need(sandbox, 'git')
    const where = '/home/user/repo'
    await repo.configureUser('A Tester', 'tester@example.org')
    await repo.init('/home/user/hub.git', { bare: true, initialBranch: 'main' })
    await repo.init(where, { initialBranch: 'main' })
    await repo.setConfig('core.filemode', 'false', { scope: 'local', path: where })
    assert.equal((await repo.getConfig('core.filemode', { scope: 'local', path: where })).trim(), 'false')
    await work(sandbox, where)
    await repo.createBranch(where, 'side')
    assert.deepEqual((await repo.branches(where)).branches.sort(), ['main', 'side'])
    await repo.checkoutBranch(where, 'main')
    await repo.deleteBranch(where, 'side')
    await repo.remoteAdd(where, 'origin', 'file:///home/user/hub.git')
    assert.equal((await repo.remoteGet(where, 'origin')).trim(), 'file:///home/user/hub.git')
    await repo.push(where, { remote: 'origin', branch: 'main' })
    await repo.clone('file:///home/user/hub.git', { path: '/home/user/copy', branch: 'main' })
    await sandbox.files.write(`${where}/b.txt`, 'new\n')
    await repo.add(where)
    await repo.commit(where, 'second')
    await repo.push(where)
    await repo.pull('/home/user/copy')
    assert.equal(await sandbox.files.read('/home/user/copy/b.txt'), 'new\n')
    await repo.dangerouslyAuthenticate({ username: 'me', password: 'not-a-real-token', host: 'git.example.org' })
  })
}

async function work(sandbox, where) {
  const repo = sandbox.git
  await sandbox.files.write(`${where}/a.txt`, 'one\n')
  assert.deepEqual((await repo.status(where)).fileStatus.map((entry) => entry.name), ['a.txt'])
  await repo.add(where)
  await repo.commit(where, 'first')
  assert.equal((await repo.status(where)).isClean, true)
  await sandbox.files.write(`${where}/a.txt`, 'two\n')
  await repo.restore(where, { paths: ['a.txt'], worktree: true })
  await sandbox.files.write(`${where}/a.txt`, 'three\n')
  await repo.reset(where, { mode: 'hard', target: 'HEAD' })
  assert.equal(await sandbox.files.read(`${where}/a.txt`), 'one\n')
}

export const scenarios = {
  file_contents: fileContents,
  many_files: manyFiles,
  file_tree: fileTree,
  file_details: fileDetails,
  compressed_files: compressedFiles,
  watch_folder: watchFolder,
  file_urls: fileUrls,
  git,
}
