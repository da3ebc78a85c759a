// Which public methods of the SDK ran. All of them: read from its declarations, where private ones are marked. The called ones:
// every method is wrapped, on the class and on its prototype, by one that notes its name and goes on.

const CLASSES = ['Sandbox', 'SandboxApi', 'Filesystem', 'Commands', 'Pty', 'Git', 'CommandHandle', 'WatchHandle']

/** `{ "Sandbox.create": {isStatic} }` of a class in the declarations. */
function declared(declarations, name) {
  const text = declarations.replace(/\/\*\*[^]*?\*\//g, '')
  const body = text.match(new RegExp(`^(?:export )?declare class ${name}\\b[^]*?\\n}`, 'm'))?.[0] ?? ''
  const members = new Map()
  for (const line of body.split('\n')) {
    const found = line.match(/^ {2,4}(static |get )?(\w+)(?:<[^(]*>)?\(/)
    if (!found || found[2] === 'constructor') continue
    members.set(found[2], { isStatic: found[1] === 'static ', isGetter: found[1] === 'get ' })
  }
  return members
}

export class Recorder {
  constructor(sdk) {
    this.public = new Set()
    this.called = new Set()
    this.sdk = sdk
    this.wrapClass(sdk.e2b.Sandbox, 'Sandbox')
    this.wrapClass(Object.getPrototypeOf(sdk.e2b.Sandbox), 'SandboxApi')
    for (const name of CLASSES.slice(2)) for (const member of declared(sdk.declarations, name).keys()) this.public.add(`${name}.${member}`)
    // The classes of the modules are not exported; the first sandbox and handles show them.
    const create = sdk.e2b.Sandbox.create
    const recorder = this
    sdk.e2b.Sandbox.create = async function (...given) {
      const sandbox = await create.apply(this, given)
      recorder.wrapModules(sandbox)
      return sandbox
    }
  }

  wrapModules(sandbox) {
    const modules = { Filesystem: sandbox.files, Commands: sandbox.commands, Pty: sandbox.pty, Git: sandbox.git }
    for (const [name, module] of Object.entries(modules)) this.wrapClass(module.constructor, name)
  }

  /** A handle that a scenario got: its class is wrapped from then on. */
  wrapHandle(handle, name) {
    this.wrapClass(handle.constructor, name)
  }

  wrapClass(owner, name) {
    if (Object.hasOwn(owner, '__recorded')) return
    Object.defineProperty(owner, '__recorded', { value: true })
    for (const [member, how] of declared(this.sdk.declarations, name)) {
      const label = `${name}.${member}`
      this.public.add(label)
      // A static and an instance method may share a name; either counts.
      for (const place of [owner, owner.prototype]) {
        const descriptor = Object.getOwnPropertyDescriptor(place, member)
        if (!descriptor) continue
        const inner = how.isGetter ? descriptor.get : descriptor.value
        if (typeof inner !== 'function') continue
        const recorder = this
        const outer = function (...given) {
          recorder.called.add(label)
          return recorder.noted(inner.apply(this, given))
        }
        Object.defineProperty(place, member, how.isGetter ? { ...descriptor, get: outer } : { ...descriptor, value: outer })
      }
    }
  }

  /** Results that are handles let their classes be wrapped. */
  noted(result) {
    if (typeof result?.then !== 'function') return result
    return result.then((value) => {
      if (typeof value?.disconnect === 'function') this.wrapHandle(value, 'CommandHandle')
      else if (value?.constructor?.name?.includes('WatchHandle')) this.wrapHandle(value, 'WatchHandle')
      return value
    })
  }

  stop() {
    return { public: [...this.public].sort(), called: [...this.called].sort() }
  }
}
