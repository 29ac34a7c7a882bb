// Compiles every .wgsl file of a folder with Tint, the WGSL compiler of Chromium, which refuses what naga does not look for:
// a barrier that not every lane meets, and whatever only naga takes for WGSL. Prints every error; ends with 1 where there is one.
//   node tint.mjs FOLDER_OF_NODE_MODULES FOLDER_OF_WGSL
// Needs no adapter: the package `webgpu` has a backend that compiles and runs nothing.
import { readFileSync, readdirSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';

const [modules, folder] = process.argv.slice(2);
const { create } = createRequire(join(resolve(modules), 'index.js'))('webgpu');
// Kept while devices live: the package does not do so itself.
const gpu = create(['backend=null']);
const adapter = await gpu.requestAdapter();
const device = await adapter.requestDevice({ requiredFeatures: ['subgroups', 'shader-f16'] });

let numErrors = 0;
const files = readdirSync(folder).filter((name) => name.endsWith('.wgsl'));
for (const file of files) {
    // naga takes subgroup operations without the directive and refuses it; on the first line, so that places stay true.
    const code = 'enable subgroups; ' + readFileSync(join(folder, file), 'utf8');
    device.pushErrorScope('validation');
    const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
    await device.popErrorScope();
    for (const { message, lineNum } of messages.filter(({ type }) => type === 'error')) {
        console.log(`${file}:${lineNum}: ${message}\n  | ${code.split('\n')[lineNum - 1]}`);
        numErrors += 1;
    }
}
console.log(`${files.length} kernels, ${numErrors} errors`);
process.exit(gpu && numErrors === 0 && files.length > 0 ? 0 : 1);
