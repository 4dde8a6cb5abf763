/** Prints the text of a stream as it comes: node dist/examples/generate.js ROUTER,ROUTER PROMPT SEED MAX_TOKENS */

import { Client, MeshError } from "../src/index.js"; // elsewhere: "@pdmesh/client"

const [routers = "127.0.0.1:8100", prompt = "Once upon a time", seed = "7", maxTokens = "40"] = process.argv.slice(2);
const client = new Client(routers);
try {
  const options = { seed: BigInt(seed), maxTokens: Number(maxTokens), timeoutMs: 60_000 };
  for await (const event of client.generateStream(prompt, options)) {
    if (event.type === "started") console.error(`request ${event.requestId}, seed ${event.seed}`);
    if (event.type === "delta") process.stdout.write(event.text);
    if (event.type === "completed") console.error(`${event.usage.completionTokens} tokens, ${event.numResumes} routers lost`);
  }
} catch (error) {
  if (!(error instanceof MeshError)) throw error;
  console.error(`${error.name}: ${error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
