// A chart over time. It is drawn with the colours of the page, as wide as its place; what it shows is in a table beside it, too.
import { useEffect, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export interface PlotLook {
  ink: string;
  accent: string;
  grid: string;
  /** What both axes have in common. */
  axis: uPlot.Axis;
}

export interface PlotContent {
  options: Omit<uPlot.Options, "width" | "height">;
  data: uPlot.AlignedData;
}

const HEIGHT = 180;

interface PlotProps {
  /** What the chart shows, for those who do not see it. */
  label: string;
  /** Is called, and the chart drawn again, where it is another function. */
  content: (look: PlotLook) => PlotContent;
}

export function Plot({ label, content }: PlotProps) {
  const room = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = room.current;
    if (!element) return;
    const style = getComputedStyle(element);
    const [ink, accent, grid] = ["--soft", "--accent", "--line"].map((name) => style.getPropertyValue(name)) as [string, string, string];
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const { options, data } = content({ ink, accent, grid, axis });
    const plot = new uPlot({ width: element.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { show: false }, ...options }, data, element);
    const resized = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [content]);
  return <div ref={room} className="chart" role="img" aria-label={label} />;
}
