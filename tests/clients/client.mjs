// The contract by grpc-js: gRPC for Node, over Node's own HTTP/2, with stubs made from the proto files at run time.
import assert from "node:assert/strict";
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const { PACELINE_ADDRESS, PACELINE_KEY, PACELINE_ADMIN_KEY, PACELINE_TENANT, PACELINE_PROTO, GOOGLE_PROTO } = process.env;
const PATIENCE = 60_000;

const definition = loader.loadSync(
  ["generation", "admin"].map((name) => path.join(PACELINE_PROTO, "paceline", "v1", `${name}.proto`)),
  { includeDirs: [PACELINE_PROTO], keepCase: true, enums: String, longs: Number, defaults: true, oneofs: true },
);
const { v1 } = grpc.loadPackageDefinition(definition).paceline;

const google = new protobuf.Root();
google.resolvePath = (_, target) =>
  target.startsWith("google/protobuf/any") ? target : path.isAbsolute(target) ? target : path.join(GOOGLE_PROTO, target);
google.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"]);

const credentials = grpc.credentials.createInsecure();
const generation = new v1.GenerationService(PACELINE_ADDRESS, credentials);
const admin = new v1.AdminService(PACELINE_ADDRESS, credentials);

function metadata(key) {
  const made = new grpc.Metadata();
  if (key) made.set("authorization", `Bearer ${key}`);
  return made;
}

function request(max_tokens, fields = {}) {
  return { prompt_text: "def add(a, b):", stop: { max_tokens, ignore_eos: true }, sampling: { temperature: 0 }, ...fields };
}

function generate(message, { key = PACELINE_KEY, timeout = PATIENCE } = {}) {
  return generation.Generate(message, metadata(key), { deadline: Date.now() + timeout });
}

function ask(method, message, key = PACELINE_ADMIN_KEY) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + PATIENCE };
    admin[method](message, metadata(key), options, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

async function failure(message, options) {
  try {
    for await (const _ of generate(message, options));
  } catch (error) {
    return error;
  }
  assert.fail("the call succeeded");
}

// The typed details of a status, by the names of their types.
function details(error) {
  const [packed] = error.metadata.get("grpc-status-details-bin");
  const status = google.lookupType("google.rpc.Status").decode(packed);
  assert.equal(status.code, error.code);
  assert.equal(status.message, error.details);
  const found = {};
  for (const { type_url, value } of status.details) {
    const name = type_url.split("/").pop();
    found[name.split(".").pop()] = google.lookupType(name).decode(value);
  }
  assert.equal(found.ErrorInfo.domain, "paceline");
  assert.equal(found.ErrorInfo.metadata.request_id, error.metadata.get("x-request-id")[0]);
  return found;
}

const checks = {
  async stream() {
    const call = generate(request(32));
    const named = new Promise((resolve) => call.once("metadata", (given) => resolve(given.get("x-request-id")[0])));
    const responses = [];
    for await (const response of call) responses.push(response);
    const { finished } = responses.at(-1);
    assert.equal(responses[0].started.request_id, await named);
    assert.equal(finished.usage.completion_tokens, 32);
    assert.equal(finished.reason, "FINISH_REASON_MAX_TOKENS");
    assert.ok(responses.map(({ text }) => text).join(""));
  },

  async cancel() {
    const cancelled = async () => {
      const { tenants } = await ask("GetStats", { tenant: PACELINE_TENANT });
      return tenants.reduce((sum, { ended }) => sum + (ended.CANCELLED ?? 0), 0);
    };
    const before = await cancelled();
    const call = generate(request(100, { n: 24 }));
    const code = new Promise((resolve) => call.on("error", (error) => resolve(error.code)));
    await new Promise((resolve) => call.once("data", resolve));
    call.cancel();
    assert.equal(await code, grpc.status.CANCELLED);
    while ((await cancelled()) === before) await sleep(10);
    const load = await ask("GetLoad", {});
    assert.deepEqual([load.running_requests, load.waiting_requests], [0, 0]);
    assert.equal(load.free_kv_blocks, load.kv_blocks);
  },

  async deadline() {
    const error = await failure(request(100, { n: 24 }), { timeout: 50 });
    assert.equal(error.code, grpc.status.DEADLINE_EXCEEDED);
  },

  async wrong_key() {
    for (const key of ["paceline_" + "x".repeat(43), ""]) {
      const error = await failure(request(1), { key });
      assert.equal(error.code, grpc.status.UNAUTHENTICATED);
      assert.equal(details(error).ErrorInfo.reason, "UNAUTHENTICATED");
    }
    const error = await ask("GetLoad", {}, PACELINE_KEY).then(() => assert.fail("a tenant is no admin"), (given) => given);
    assert.equal(error.code, grpc.status.PERMISSION_DENIED);
    assert.equal(details(error).ErrorInfo.reason, "PERMISSION_DENIED");
  },

  async details() {
    const wrong = await failure(request(1, { sampling: { top_p: 1.5 } }));
    assert.equal(wrong.code, grpc.status.INVALID_ARGUMENT);
    assert.equal(details(wrong).ErrorInfo.reason, "SAMPLING_PARAM_OUT_OF_RANGE");
    assert.deepEqual(details(wrong).BadRequest.fieldViolations.map(({ field }) => field), ["sampling.top_p"]);
    const large = await failure(request(1 << 20));
    assert.equal(large.code, grpc.status.RESOURCE_EXHAUSTED);
    assert.equal(details(large).ErrorInfo.reason, "TENANT_QUOTA_EXCEEDED");
    assert.equal(details(large).QuotaFailure.violations[0].subject, `tenant:${PACELINE_TENANT}`);
    assert.deepEqual(large.metadata.get("grpc-retry-pushback-ms"), ["-1"]);
  },
};

for (const [name, check] of Object.entries(checks)) {
  const late = setTimeout(() => {
    console.error(`${name}: nothing for ${PATIENCE / 1000} s`);
    process.exit(1);
  }, PATIENCE);
  await check();
  clearTimeout(late);
  console.log(`ok ${name}`);
}
generation.close();
admin.close();
