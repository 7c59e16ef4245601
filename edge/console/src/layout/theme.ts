// Light, dark, or what the device says; remembered on this device.
import { useState } from "react";
import { readStored, store } from "../ui/browser-storage.ts";

const STORED = "gpuaas-theme";
export const THEMES = ["device", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

function storedTheme(): Theme {
  const found = readStored("local", STORED);
  return THEMES.find((theme) => theme === found) ?? "device";
}

export function applyTheme(theme: Theme = storedTheme()): void {
  document.documentElement.dataset["theme"] = theme;
}

export function useTheme(): [Theme, () => void] {
  const [theme, setTheme] = useState(storedTheme);
  const next = () => {
    const after = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "device";
    store("local", STORED, after);
    applyTheme(after);
    setTheme(after);
  };
  return [theme, next];
}
