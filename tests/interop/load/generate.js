// Load on a mesh with k6: pdmesh.v1 Generate over k6's gRPC streams, one request after the other.
//
//   k6 run --env ROUTER=127.0.0.1:8100 tests/interop/load/generate.js
//
// ROUTER    host:port (default 127.0.0.1:8100)
// PROMPTS   file with an array of texts in JSON; request by request the next one (default: two of its own)
// REQUESTS  how many count (20); WARM_UP: how many go before them (2)
// TOKENS    of each answer (48)
//
// ttft      milliseconds from before the call to the first message with tokens
// tpot      milliseconds from that message to the last one with tokens, over the number of tokens after the first
// completed requests that counted and whose stream ended with `completed`

import { check } from 'k6'
import exec from 'k6/execution'
import { Counter, Trend } from 'k6/metrics'
import { Client, Stream } from 'k6/net/grpc'

const ROUTER = __ENV.ROUTER || '127.0.0.1:8100'
const REQUESTS = Number(__ENV.REQUESTS || 20)
const WARM_UP = Number(__ENV.WARM_UP || 2)
const TOKENS = Number(__ENV.TOKENS || 48)
const PROMPTS = __ENV.PROMPTS ? JSON.parse(open(__ENV.PROMPTS)) : ['Once upon a time', 'The capital of France is']

const ttft = new Trend('ttft', true)
const tpot = new Trend('tpot', true)
const completed = new Counter('completed')

const client = new Client()
const protos = import.meta.resolve('../../../protos/').replace('file://', '')
client.load([protos], 'pdmesh/v1/mesh.proto')

export const options = {
  scenarios: { generate: { executor: 'per-vu-iterations', vus: 1, iterations: WARM_UP + REQUESTS } },
  summaryTrendStats: ['med', 'avg', 'p(90)', 'max', 'count'],
}

export default function () {
  const number = exec.vu.iterationInScenario
  if (number === 0) {
    client.connect(ROUTER, { plaintext: true, timeout: '10s' })
  }
  let first = 0
  let last = 0
  let tokens = 0
  let complete = false
  const began = Date.now()
  const stream = new Stream(client, 'pdmesh.v1.Mesh/Generate', { timeout: '60s' })
  stream.on('data', (message) => {
    if (message.delta && message.delta.tokenIds.length > 0) {
      last = Date.now()
      first = first || last
      tokens += message.delta.tokenIds.length
    }
    complete = complete || Boolean(message.completed)
  })
  stream.on('error', (error) => console.error(`${error.code}: ${error.message}`))
  stream.on('end', () => {
    const good = check(complete, { 'stream is complete': (value) => value })
    if (good && number >= WARM_UP) {
      completed.add(1)
      ttft.add(first - began)
      tpot.add((last - first) / Math.max(1, tokens - 1))
    }
  })
  stream.write({
    text: PROMPTS[number % PROMPTS.length],
    sampling: { maxTokens: TOKENS, temperature: 0.8, ignoreEos: true },
  })
  stream.end()
}
