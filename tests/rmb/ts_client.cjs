// The official TypeScript client against a relay and a peer of ours; only its registry is stubbed.
// node ts_client.cjs MODULES RELAY REGISTRY MNEMONIC OWN-TWIN DESTINATION
const [modules, relay, registry, mnemonic, own, destination] = process.argv.slice(2);
const { Client } = require(require.resolve("@threefold/rmb_direct_client", { paths: [modules] }));

async function twin(id) {
  const answer = await fetch(`${registry}/twins/${id}`);
  if (!answer.ok) throw new Error(`twin ${id}: ${answer.status}`);
  const found = await answer.json();
  return { id: found.id, accountId: "0x" + found.account, relay: found.relay, pk: "0x" + found.pk };
}

const updates = [];
const stub = {
  connect: async () => {},
  disconnect: async () => {},
  twins: {
    get: async ({ id }) => twin(id),
    getTwinIdByAccountId: async () => Number(own),
    update: async change => {
      updates.push(change);
      return { apply: async () => {} };
    },
  },
};

async function main() {
  const client = new Client("wss://none", relay, mnemonic, "ts-session", "sr25519", 2);
  client.tfclient = stub;
  await client.connect();
  const results = { updates: updates.length };
  const call = async (command, data) => {
    const id = await client.send(command, data, Number(destination), 5);
    try {
      return { answer: await client.read(id) };
    } catch (error) {
      return { error: String(error.message || error) };
    }
  };
  results.echo = await call("echo", JSON.stringify({ a: "ü" }));
  results.failing = await call("failing", JSON.stringify(1));
  results.version = await call("rmb.version", JSON.stringify(null));
  const ping = await client.ping();
  await client.read(ping).then(() => (results.ping = "pong"), error => (results.ping = String(error)));
  console.log("RESULT " + JSON.stringify(results));
  process.exit(0);
}

main().catch(error => {
  console.error(error);
  process.exit(1);
});
