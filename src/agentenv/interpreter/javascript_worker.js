// The worker for JavaScript: takes cells from descriptor 3 and tells what happens on descriptor 4, as `python_worker.py` does.
//
// A cell is a script, not a module, but may use `import` and top-level `await`. Its declarations become variables of the global
// scope, so that later cells see them and may declare them again. The value of a last statement that is an expression is the
// result. An interrupt (SIGINT) stops synchronous code at once, and the waiting of asynchronous code.
'use strict';

const { Console } = require('node:console');
const fs = require('node:fs');
const Module = require('node:module');
const path = require('node:path');
const { pathToFileURL } = require('node:url');
const util = require('node:util');
const vm = require('node:vm');
const acorn = require('acorn');

const REQUESTS_FD = 3;
const EVENTS_FD = 4;

// --- telling -----------------------------------------------------------------------------------------------------------

function writeAll(fd, bytes) {
  let rest = bytes;
  while (rest.length > 0) {
    try {
      rest = rest.subarray(fs.writeSync(fd, rest));
    } catch (problem) {
      if (problem.code !== 'EAGAIN') throw problem;
    }
  }
}

function emit(event) {
  const ascii = JSON.stringify(event).replace(/[\u0080-\uffff]/g, (c) => '\\u' + c.charCodeAt(0).toString(16).padStart(4, '0'));
  writeAll(EVENTS_FD, Buffer.from(ascii + '\n'));
}

// An interrupt ends the cell between any two steps, also inside node's own stream code, whose state would then say for ever
// that a write is under way. So output is written at once and no state is kept; a full pipe makes the cell wait.
function writeWithoutState(stream, fd) {
  stream._handle?.setBlocking?.(true);
  stream.write = (chunk, encoding, done) => {
    if (typeof chunk !== 'string' && !ArrayBuffer.isView(chunk)) {
      const kind = chunk === null ? 'null' : typeof chunk;
      throw Object.assign(new TypeError(`a chunk of output is a string, Buffer or TypedArray, not ${kind}`), { code: 'ERR_INVALID_ARG_TYPE' });
    }
    const isText = typeof chunk === 'string';
    const bytes = isText
      ? Buffer.from(chunk, typeof encoding === 'string' ? encoding : 'utf8')
      : Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength);
    writeAll(fd, bytes);
    const callback = typeof encoding === 'function' ? encoding : done;
    if (typeof callback === 'function') process.nextTick(callback);
    return true;
  };
  return { write: (text) => stream.write(text) }; // whoever puts a `write` of their own on the stream sees the console's too
}

function emitError(error) {
  const isError = error instanceof Error || Object.prototype.toString.call(error) === '[object Error]';
  const name = isError ? String(error.name) : 'Error';
  const value = isError ? String(error.message) : util.inspect(error);
  emit({ type: 'error', name, value, traceback: isError ? cellStack(error) : value });
}

// The stack down to the cell: what is below it is this file.
function cellStack(error) {
  const lines = String(error.stack || `${error.name}: ${error.message}`).split('\n');
  const ours = lines.findIndex((line) => line.includes(__filename) || line.includes('node:vm'));
  return (ours > 0 ? lines.slice(0, ours) : lines).join('\n');
}

// Objects may say how they look, by the names that notebooks for JavaScript use.
function emitResult(value) {
  if (value === undefined) return;
  const data = { 'text/plain': util.inspect(value) };
  const representations = { _toHtml: 'text/html', _toMarkdown: 'text/markdown', _toSvg: 'image/svg+xml', _toPng: 'image/png' };
  if (value !== null && typeof value === 'object') {
    for (const [method, type] of Object.entries(representations)) {
      if (typeof value[method] === 'function') data[type] = String(value[method]());
    }
    if (Array.isArray(value) || Object.getPrototypeOf(value) === Object.prototype) {
      try {
        data['application/json'] = JSON.parse(JSON.stringify(value));
      } catch { /* a cycle or a big integer: its text must do */ }
    }
  }
  emit({ type: 'bundle', main: true, data });
}

// --- cells as scripts --------------------------------------------------------------------------------------------------

const IMPORT = '__aenv_import';
const FUNCTIONS = new Set(['FunctionDeclaration', 'FunctionExpression', 'ArrowFunctionExpression', 'ClassBody', 'StaticBlock']);

// Every node below `node`, without entering functions.
function* inside(node) {
  for (const key of Object.keys(node)) {
    const value = node[key];
    for (const child of Array.isArray(value) ? value : [value]) {
      if (child && typeof child.type === 'string' && !FUNCTIONS.has(child.type)) {
        yield child;
        yield* inside(child);
      }
    }
  }
}

// Every node below `node`.
function* everywhere(node) {
  for (const value of Object.values(node)) {
    for (const child of Array.isArray(value) ? value : [value]) {
      if (child && typeof child.type === 'string') {
        yield child;
        yield* everywhere(child);
      }
    }
  }
}

function namesOf(pattern) {
  switch (pattern.type) {
    case 'Identifier': return [pattern.name];
    case 'ObjectPattern': return pattern.properties.flatMap((p) => namesOf(p.type === 'RestElement' ? p.argument : p.value));
    case 'ArrayPattern': return pattern.elements.filter(Boolean).flatMap(namesOf);
    case 'AssignmentPattern': return namesOf(pattern.left);
    case 'RestElement': return namesOf(pattern.argument);
    default: return [];
  }
}

function isAsync(program) {
  for (const node of inside(program)) {
    if (node.type === 'AwaitExpression' || node.type === 'ImportDeclaration' || (node.type === 'ForOfStatement' && node.await)) return true;
  }
  return false;
}

// Returns {code, isAsync, hasValue}: a script that leaves its declarations global. Throws SyntaxError.
function toScript(source) {
  const options = { ecmaVersion: 'latest', sourceType: 'module', allowAwaitOutsideFunction: true, allowHashBang: true, allowReturnOutsideFunction: false };
  let program;
  try {
    program = acorn.parse(source, options);
  } catch (first) {
    try {
      program = acorn.parse(source, { ...options, sourceType: 'script' }); // `with`, octal numbers and other old things
    } catch {
      throw new SyntaxError(first.message.replace(/ \((\d+):(\d+)\)$/, ' (line $1, column $2)'));
    }
  }
  const edits = [];
  const edit = (start, end, text) => edits.push({ start, end, text });
  const asynchronous = isAsync(program);
  const hoisted = new Set();
  const last = program.body.at(-1);
  const hasValue = last !== undefined && last.type === 'ExpressionStatement';
  for (const node of everywhere(program)) {
    if (node.type === 'ImportExpression') edit(node.start, node.start + 'import'.length, IMPORT); // scripts cannot load modules
  }
  for (const statement of program.body) {
    rewrite(statement, source, edit, asynchronous, hoisted);
  }
  if (asynchronous) {
    for (const node of inside({ body: program.body.filter((s) => !/^(Variable|Export)/.test(s.type)) })) {
      if (node.type === 'VariableDeclaration' && node.kind === 'var') hoistNested(node, program, edit, hoisted);
    }
    if (hasValue) {
      edit(last.start, last.start, 'return { value: (');
      edit(last.expression.end, last.end, ') };');
    }
  }
  let code = source;
  for (const { start, end, text } of edits.sort((a, b) => b.start - a.start || b.end - a.end)) {
    code = code.slice(0, start) + text + code.slice(end);
  }
  if (!asynchronous) return { code, isAsync: false, hasValue };
  const variables = hoisted.size > 0 ? `var ${[...hoisted].join(', ')}; ` : '';
  return { code: `${variables}(async () => { ${code}\n})()`, isAsync: true, hasValue };
}

// One top-level statement. In a synchronous cell `var` makes a variable global; in an asynchronous one, which is the body of
// a function, declarations become assignments to variables declared outside of it.
function rewrite(statement, source, edit, asynchronous, hoisted) {
  switch (statement.type) {
    case 'ImportDeclaration': {
      const from = `await ${IMPORT}(${statement.source.raw})`;
      const whole = statement.specifiers.find((s) => s.type === 'ImportNamespaceSpecifier');
      const named = statement.specifiers.filter((s) => s !== whole);
      statement.specifiers.forEach((s) => hoisted.add(s.local.name));
      const parts = named.map((s) => {
        const imported = s.type === 'ImportDefaultSpecifier' ? 'default' : (s.imported.name ?? s.imported.value);
        return `${JSON.stringify(imported)}: ${s.local.name}`;
      });
      const first = whole ? `${whole.local.name} = ${from}; ` : '';
      const rest = parts.length > 0 || !whole ? `({ ${parts.join(', ')} } = ${from});` : '';
      edit(statement.start, statement.end, first + rest);
      break;
    }
    case 'ExportNamedDeclaration':
    case 'ExportDefaultDeclaration':
      if (statement.declaration && statement.declaration.type.endsWith('Declaration') && statement.declaration.id !== null) {
        edit(statement.start, statement.declaration.start, '');
        rewrite(statement.declaration, source, edit, asynchronous, hoisted);
      } else {
        throw new SyntaxError('a cell can export declarations only: nothing imports it');
      }
      break;
    case 'ExportAllDeclaration':
      throw new SyntaxError('a cell cannot export: nothing imports it');
    case 'VariableDeclaration':
      if (asynchronous) hoistDeclaration(statement, edit, hoisted);
      else edit(statement.start, statement.start + statement.kind.length, 'var');
      break;
    case 'ClassDeclaration':
      if (asynchronous) hoisted.add(statement.id.name);
      edit(statement.start, statement.start, `${asynchronous ? '' : 'var '}${statement.id.name} = `);
      edit(statement.end, statement.end, ';');
      break;
    case 'FunctionDeclaration':
      if (asynchronous) {
        hoisted.add(statement.id.name);
        edit(statement.end, statement.end, `\n;globalThis.${statement.id.name} = ${statement.id.name};`);
      }
      break;
  }
}

function hoistDeclaration(declaration, edit, hoisted) {
  declaration.declarations.forEach((d) => namesOf(d.id).forEach((name) => hoisted.add(name)));
  edit(declaration.start, declaration.declarations[0].start, 'void (');
  for (const declarator of declaration.declarations) {
    if (!declarator.init) edit(declarator.end, declarator.end, ' = undefined');
  }
  edit(declaration.declarations.at(-1).end, declaration.end, ');');
}

// `var` in a block of an asynchronous cell.
function hoistNested(declaration, program, edit, hoisted) {
  declaration.declarations.forEach((d) => namesOf(d.id).forEach((name) => hoisted.add(name)));
  for (const node of inside(program)) {
    const isHead = (node.type === 'ForOfStatement' || node.type === 'ForInStatement') && node.left === declaration;
    const isInit = node.type === 'ForStatement' && node.init === declaration;
    if (isHead) return edit(declaration.start, declaration.declarations[0].start, '');
    if (isInit) {
      edit(declaration.start, declaration.declarations[0].start, '');
      return declaration.declarations.filter((d) => !d.init).forEach((d) => edit(d.end, d.end, ' = undefined'));
    }
  }
  edit(declaration.start, declaration.declarations[0].start, 'void (');
  declaration.declarations.filter((d) => !d.init).forEach((d) => edit(d.end, d.end, ' = undefined'));
  edit(declaration.declarations.at(-1).end, declaration.end, ');');
}

// --- running -----------------------------------------------------------------------------------------------------------

let executionCount = 0;
let stop = null; // ends the waiting for the cell that runs now

async function execute(request) {
  for (const name of request.unset) delete process.env[name];
  Object.assign(process.env, request.set);
  if (request.reseed) randomPool.left = 0;
  const before = Object.fromEntries(Object.keys(request.once).map((name) => [name, process.env[name]]));
  Object.assign(process.env, request.once);
  executionCount += 1;
  emit({ type: 'number_of_executions', execution_count: executionCount });
  const interrupted = new Promise((_, reject) => {
    stop = () => reject(Object.assign(new Error('Execution interrupted'), { name: 'Interrupted', stack: 'Interrupted: Execution interrupted' }));
  });
  interrupted.catch(() => {});
  try {
    const { code, isAsync: waits, hasValue } = toScript(request.code);
    const script = new vm.Script(code, { filename: `cell-${executionCount}.js` });
    let value = script.runInThisContext({ breakOnSigint: true, displayErrors: false });
    if (waits) value = (await Promise.race([value, interrupted]))?.value;
    else if (util.types.isPromise(value)) value = await Promise.race([value, interrupted]);
    if (hasValue) emitResult(value);
  } catch (error) {
    emitError(error && error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED' ? Object.assign(error, { name: 'Interrupted' }) : error);
  } finally {
    stop = null;
  }
  for (const [name, value] of Object.entries(before)) {
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  emit({ type: 'end' });
}

// Modules are looked for from the working directory, as if the cell were a file there.
async function importFromHere(specifier) {
  if (Module.isBuiltin?.(specifier) || Module.builtinModules.includes(specifier) || /^(node|data|file):/.test(specifier)) return import(specifier);
  const require = Module.createRequire(path.join(process.cwd(), 'cell.js'));
  try {
    return import(pathToFileURL(require.resolve(specifier)).href);
  } catch (problem) {
    if (problem.code !== 'ERR_PACKAGE_PATH_NOT_EXPORTED') throw problem;
    return import(pathToFileURL(moduleOnlyEntry(specifier, require, problem)).href);
  }
}

// The entry of a package that offers modules only, which `require.resolve` refuses.
function moduleOnlyEntry(specifier, require, problem) {
  const name = specifier.startsWith('@') ? specifier.split('/').slice(0, 2).join('/') : specifier.split('/')[0];
  const key = '.' + specifier.slice(name.length);
  for (const folder of require.resolve.paths(specifier) ?? []) {
    const file = path.join(folder, name, 'package.json');
    if (!fs.existsSync(file)) continue;
    const { exports } = JSON.parse(fs.readFileSync(file, 'utf8'));
    let target = typeof exports === 'string' || !Object.keys(exports ?? {}).some((k) => k.startsWith('.')) ? exports : exports[key];
    while (target && typeof target === 'object') target = target.node ?? target.import ?? target.default;
    if (typeof target === 'string') return path.join(folder, name, target);
  }
  throw problem;
}

// Random numbers from the kernel: node's own generators (V8's and OpenSSL's) are part of the template's memory, the same in
// every sandbox.
const randomPool = { words: new Uint32Array(512), left: 0, source: fs.openSync('/dev/urandom', 'r') };
Math.random = () => {
  if (randomPool.left < 2) {
    fs.readSync(randomPool.source, randomPool.words);
    randomPool.left = randomPool.words.length;
  }
  const high = randomPool.words[--randomPool.left] >>> 5;
  const low = randomPool.words[--randomPool.left] >>> 6;
  return (high * 67108864 + low) / 9007199254740992;
};

function main() {
  Object.defineProperty(globalThis, IMPORT, { value: importFromHere });
  globalThis.require = (id) => Module.createRequire(path.join(process.cwd(), 'cell.js'))(id);
  globalThis.require.resolve = (id, options) => Module.createRequire(path.join(process.cwd(), 'cell.js')).resolve(id, options);
  globalThis.module = { exports: {} };
  globalThis.exports = globalThis.module.exports;
  process.argv.splice(1);
  process.exitCode = 0;
  const [stdout, stderr] = [writeWithoutState(process.stdout, 1), writeWithoutState(process.stderr, 2)];
  globalThis.console = new Console({ stdout, stderr, ignoreErrors: false });
  process.on('SIGINT', () => stop?.());
  process.on('uncaughtException', (error) => process.stderr.write(`Uncaught ${util.inspect(error)}\n`));
  process.on('unhandledRejection', (error) => process.stderr.write(`Unhandled rejection: ${util.inspect(error)}\n`));
  let turn = Promise.resolve();
  let rest = '';
  const requests = fs.createReadStream(null, { fd: REQUESTS_FD, encoding: 'utf8' });
  requests.on('data', (text) => {
    const lines = (rest + text).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      turn = turn.then(() => execute(JSON.parse(line)));
    }
  });
  requests.on('close', () => process.exit(0));
  emit({ type: 'ready' });
}

main();
