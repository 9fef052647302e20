// The official JavaScript client, driven by commands on standard input, one JSON object a line; what it hears goes
// to standard output the same way. Arguments: the directory of the installed packages, the project's URL, a key.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [packages, url, key] = process.argv.slice(2);
const require = createRequire(`${packages}/`);
const { createClient } = require("@supabase/supabase-js");

const say = (kind, facts) => process.stdout.write(`${JSON.stringify({ kind, ...facts })}\n`);
const client = createClient(url, key, {
  auth: { persistSession: false, autoRefreshToken: false },
  realtime: { transport: require("ws"), reconnectAfterMs: () => 50 },
});
const channels = new Map();

const commands = {
  subscribe({ topic, config = {}, changes = [] }) {
    const channel = client.channel(topic, { config });
    for (const entry of changes) {
      channel.on("postgres_changes", entry, (change) => say("change", { topic, change, entry }));
    }
    channel.on("broadcast", { event: "*" }, (message) => say("broadcast", { topic, message }));
    channel.on("system", {}, (system) => say("system", { topic, system }));
    channel.subscribe((state, error) => say("state", { topic, state, error: error && error.message }));
    channels.set(topic, channel);
  },
  async send({ topic, event, payload }) {
    say("sent", { result: await channels.get(topic).send({ type: "broadcast", event, payload }) });
  },
  async leave({ topic }) {
    say("left", { result: await client.removeChannel(channels.get(topic)) });
  },
  async auth({ token }) {
    await client.realtime.setAuth(token);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...facts } = JSON.parse(line);
  await commands[command](facts);
}
process.exit(0);
