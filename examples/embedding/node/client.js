// A minimal client of RuntimeService in another language, from the published .proto files alone.
//
//   pagemirror runtime --model fingerprint --page-size 4 --num-pages 16 --listen 127.0.0.1:50061
//   npm ci && node client.js 127.0.0.1:50061
//
// It plays the scheduler for three steps: two requests begin; both get a token, and one of them has its first page replaced
// by an equal page of the other, which takes a full_refresh; then both end. After each step it reads the mirror's rows back.
// Prints one JSON object a step.
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { once } from "node:events";
import { randomBytes } from "node:crypto";
import { fileURLToPath } from "node:url";

const address = process.argv[2] ?? "127.0.0.1:50061";
const protos = process.argv[3] ?? fileURLToPath(new URL("../../../proto", import.meta.url));
const definition = protoLoader.loadSync("pagemirror/v1/runtime.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  oneofs: true,
  defaults: true,
});
const { pagemirror } = grpc.loadPackageDefinition(definition);
const client = new pagemirror.v1.RuntimeService(address, grpc.credentials.createInsecure());

// Columns are bytes: little-endian int32, or one byte a bool.
const int32 = (values) => {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, i) => bytes.writeInt32LE(value, 4 * i));
  return bytes;
};
const bools = (values) => Buffer.from(values.map(Number));
const numbers = (bytes) => Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readInt32LE(4 * i));

const call = client.Execute();
const answers = [];
let wake = () => {};
call.on("data", (answer) => {
  if (answer.message !== "heartbeat") {
    answers.push(answer);
    wake();
  }
});
call.on("error", (error) => {
  if (error.code !== grpc.status.CANCELLED) {
    console.error(`the runtime at ${address}: ${error.message}`);
    process.exit(1);
  }
});
async function answer() {
  while (!answers.length) await new Promise((resolve) => (wake = resolve));
  return answers.shift();
}

// Rows as objects, extend rows (those with ids) first, become the columns of an op.
let step = 0;
async function run(rows, released = []) {
  const column = (pick) => int32(rows.map(pick));
  call.write({
    op: {
      session_no: 1,
      step: ++step,
      req_pool_indices: column((row) => row.row),
      row_generations: column((row) => row.generation ?? 1),
      row_lens: column((row) => row.pages.length),
      begins: column((row) => row.begin),
      sizes: column((row) => row.pages.length - row.begin),
      full_refresh: bools(rows.map((row) => row.full)),
      occupied_pages: int32(rows.flatMap((row) => (row.full ? row.pages : row.pages.slice(row.begin)))),
      num_computed: column((row) => row.computed),
      num_extend_rows: rows.filter((row) => row.ids).length,
      input_lens: column((row) => row.ids?.length ?? 1),
      input_ids: int32(rows.flatMap((row) => row.ids ?? [])),
      sample: bools(rows.map(() => true)),
      released_rows: int32(released),
      lease_starts: rows
        .filter((row) => row.starts)
        .map((row) => ({ req_pool_index: row.row, request_id: row.starts, sampling: { temperature: 0 } })),
    },
  });
  const { message, result, refusal } = await answer();
  const rowsNow = await new Promise((resolve, reject) =>
    client.ReadRows({}, (error, response) => (error ? reject(error) : resolve(response))),
  );
  const pages = numbers(rowsNow.pages);
  const lens = numbers(rowsNow.valid_lens);
  const mirror = Object.fromEntries(numbers(rowsNow.rows).map((row, i) => [row, pages.splice(0, lens[i])]));
  const said = message === "refusal" ? { refusal: refusal.code, detail: refusal.detail } : { tokens: numbers(result.tokens) };
  console.log(JSON.stringify({ step, ...said, mirror }));
}

const epoch = randomBytes(6).readUIntLE(0, 6) + 1;
call.write({ hello: { protocol_version: 1, scheduler_epoch: epoch, session_no: 1, overlap_depth: 0 } });
const { hello } = await answer();
console.log(JSON.stringify({ model: hello.model, page_size: hello.page_size, num_pages: hello.num_pages }));

// Two prompts with the same first page of four tokens, each computed into pages of its own.
await run([
  { row: 1, pages: [7, 9], begin: 0, full: true, computed: 0, ids: [1, 2, 3, 4, 5], starts: "a" },
  { row: 2, pages: [3, 4], begin: 0, full: true, computed: 0, ids: [1, 2, 3, 4, 9], starts: "b" },
]);
// Row 2 takes over row 1's first page. Nothing is appended to it (size 0), so only the bit says that it has changed.
await run([
  { row: 1, pages: [7, 9], begin: 2, full: false, computed: 5 },
  { row: 2, pages: [7, 4], begin: 2, full: true, computed: 5 },
]);
// What must not come: a tail that leaves a gap. The runtime refuses it and has changed nothing.
await run([{ row: 1, pages: [7, 9, 5, 6], begin: 3, full: false, computed: 6 }]);

call.cancel();
await Promise.race([once(call, "close"), once(call, "error")]).catch(() => {});
client.close();
