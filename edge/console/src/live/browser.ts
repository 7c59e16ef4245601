// The stream of this browser.
import { useSyncExternalStore } from "react";
import { api } from "../api/client.ts";
import { EventStream, type StreamStatus } from "./event-stream.ts";

const NAME = "gpuaas-event-stream";
/** The second protocol asks for the changes of all entities; the API gives them to operators alone. */
const PROTOCOLS = ["gpu.notifications.v1", "gpu.notifications.operations"];

export const eventStream = new EventStream({
  connect: (received, closed) => {
    const url = new URL("/api/v1/notifications/ws", window.location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new WebSocket(url, PROTOCOLS);
    socket.onmessage = ({ data }) => received(data);
    socket.onclose = ({ code }) => closed(code);
    return {
      send: (text) => socket.readyState === WebSocket.OPEN && socket.send(text),
      close: () => {
        // What comes late is of a connection that was given up.
        socket.onmessage = null;
        socket.close();
      },
    };
  },
  joinTabs: (received) => {
    // Without it each tab has a connection of its own.
    if (typeof BroadcastChannel === "undefined") return () => {};
    const channel = new BroadcastChannel(NAME);
    channel.onmessage = ({ data }) => received(data);
    return (message) => channel.postMessage(message);
  },
  elect: (lead) => {
    if (navigator.locks === undefined) void lead();
    else void navigator.locks.request(NAME, lead);
  },
  // A request that is refused waits for the next login.
  checkSession: () => api.GET("/api/v1/me").then(ignore, ignore),
});

function ignore(): void {}

export function useStreamStatus(): StreamStatus {
  return useSyncExternalStore(eventStream.subscribe, eventStream.current);
}
