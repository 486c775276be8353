// Draws one dashboard from its file and the answers of a Prometheus, with Grafana's own components: what @grafana/data does
// with a panel's fields and @grafana/ui with its pixels. Grafana's server and its panel plugins are on no package index;
// what those add to a panel's file (the standard options' defaults, the grid, the marks of annotations) is written here.
import { useMemo } from 'react';
import { createRoot } from 'react-dom/client';
import {
  FieldType, ThemeContext, applyFieldOverrides, createTheme, dateTime, getFieldDisplayValues, identityOverrideProcessor,
  standardFieldConfigEditorRegistry, standardTransformers, standardTransformersRegistry, toDataFrame, transformDataFrame,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, Table, TimeSeries, VizRepeater } from '@grafana/ui';

const CELL = 30;
const GAP = 8;
const HEADER = 56;
const STANDARD = { // Grafana's, where a panel's file says nothing
  color: { mode: 'thresholds' },
  thresholds: { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] },
};
const OF_LINES = { color: { mode: 'palette-classic' }, custom: { drawStyle: 'line', pointSize: 5, showPoints: 'auto' } };

const theme = createTheme({ colors: { mode: 'dark' } });
const as = (path, id = path) => ({ id, path, name: id, process: identityOverrideProcessor, shouldApply: () => true });
standardFieldConfigEditorRegistry.setInit(() => ['unit', 'decimals', 'min', 'max', 'displayName', 'color', 'thresholds', 'mappings'].map((id) => as(id)));
standardTransformersRegistry.setInit(() =>
  ['merge', 'organize'].map((id) => Object.values(standardTransformers).find((one) => one.id === id))
    .map((transformation) => ({ id: transformation.id, name: transformation.name, transformation })));

const legend = (format, labels) => format.replace(/\{\{(\w+)\}\}/g, (_, name) => labels[name] ?? '');

/** The frames of one query, as Grafana's data source for Prometheus makes them. */
function frames({ target, result }, interval) {
  if (target.format === 'table') {
    const names = [...new Set(result.flatMap((series) => Object.keys(series.metric)))];
    return [toDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: result.map((series) => series.value[0] * 1000) },
        ...names.map((name) => ({ name, type: FieldType.string, values: result.map((series) => series.metric[name] ?? '') })),
        { name: `Value #${target.refId}`, type: FieldType.number, values: result.map((series) => Number(series.value[1])) },
      ],
    })];
  }
  return result.map((series) => toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: series.values.map(([at]) => at * 1000), config: { interval } },
      {
        name: 'Value', type: FieldType.number, labels: series.metric, values: series.values.map(([, value]) => Number(value)),
        config: { displayNameFromDS: legend(target.legendFormat || '', series.metric) },
      },
    ],
  }));
}

function dressed(panel, data) {
  const defaults = { ...STANDARD, ...(panel.type === 'timeseries' ? OF_LINES : {}), ...panel.fieldConfig.defaults };
  defaults.custom = { ...OF_LINES.custom, ...panel.fieldConfig.defaults.custom };
  defaults.thresholds.steps[0].value = -Infinity; // what JSON has no word for
  const fieldConfig = { defaults, overrides: panel.fieldConfig.overrides };
  let made = data;
  transformDataFrame(panel.transformations ?? [], data).subscribe((after) => { made = after; });
  return { fieldConfig, data: made };
}

function boxOf({ gridPos: { x, y, w, h } }) {
  const column = (window.innerWidth - GAP) / 24;
  const [left, top] = [GAP + x * column, HEADER + y * (CELL + GAP)];
  return { position: 'absolute', left, top, width: w * column - GAP, height: h * (CELL + GAP) - GAP };
}

function Row({ panel }) {
  return <div style={{ ...boxOf(panel), display: 'flex', alignItems: 'center', ...theme.typography.h6 }}>⌄ {panel.title}</div>;
}

function Panel({ panel, answers, notes, range, interval }) {
  const box = boxOf(panel);
  const { fieldConfig, data } = useMemo(() => {
    const { fieldConfig, data } = dressed(panel, answers.flatMap((one) => frames(one, interval)));
    const shown = applyFieldOverrides({ data, fieldConfig, theme, replaceVariables: (text) => text, timeZone: 'utc' });
    for (const field of shown.flatMap((frame) => frame.fields)) {
      field.config.custom = { ...fieldConfig.defaults.custom, ...field.config.custom };
    }
    return { fieldConfig, data: shown };
  }, [panel]);
  return (
    <div style={box}>
      <PanelChrome title={panel.title} description={panel.description} width={box.width} height={box.height}>
        {(width, height) => {
          const common = { width, height, timeRange: range, timeZone: 'utc' };
          switch (panel.type) {
            case 'stat': {
              const values = () => getFieldDisplayValues({
                fieldConfig, data, theme, reduceOptions: { values: false, ...panel.options.reduceOptions },
                replaceVariables: (text) => text, sparkline: panel.options.graphMode !== 'none', timeZone: 'utc',
              });
              const draw = ({ value, width, height, count }) => (
                <BigValue value={value.display} sparkline={value.sparkline} {...{ width, height, count, theme }} {...panel.options} />
              );
              return <VizRepeater {...{ width, height, source: data, orientation: 'auto', autoGrid: true }} getValues={values} renderValue={draw} />;
            }
            case 'timeseries':
              return (
                <TimeSeries frames={data} legend={panel.options.legend} options={panel.options} {...common}>
                  {(config) => { config.addHook('draw', (plot) => mark(plot, notes)); return null; }}
                </TimeSeries>
              );
            case 'table':
              return <Table data={data[0]} {...{ width, height }} />;
            default:
              throw new Error(`no way to draw a ${panel.type}`);
          }
        }}
      </PanelChrome>
    </div>
  );
}

/** An annotation as Grafana marks it: a dashed line, and a triangle on the axis. */
function mark(plot, notes) {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const { at, color } of notes) {
    const x = Math.round(plot.valToPos(at, 'x', true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const foot = bbox.top + bbox.height;
    ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
    ctx.lineWidth = 1;
    ctx.setLineDash([5, 5]);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, foot); ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath(); ctx.moveTo(x - 5, foot + 6); ctx.lineTo(x + 5, foot + 6); ctx.lineTo(x, foot); ctx.fill();
  }
  ctx.restore();
}

function Board({ board, answers, notes, from, to, step, run }) {
  const range = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: 'now', to: 'now' } };
  const clock = (at) => new Date(at * 1000).toISOString().slice(11, 16);
  const height = HEADER + (CELL + GAP) * Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ position: 'relative', height, background: theme.colors.background.canvas, overflow: 'hidden' }}>
        <div style={{ display: 'flex', alignItems: 'center', gap: 24, height: HEADER, padding: '0 16px', ...theme.typography.h5 }}>
          {board.title}
          <span style={{ ...theme.typography.body, color: theme.colors.text.secondary }}>Run: {run}</span>
          <span style={{ ...theme.typography.body, color: theme.colors.text.secondary, marginLeft: 'auto' }}>{clock(from)} to {clock(to)} UTC</span>
        </div>
        {board.panels.map((panel, index) => (panel.type === 'row'
          ? <Row key={index} panel={panel} />
          : <Panel key={index} panel={panel} answers={answers[index]} notes={notes} range={range} interval={step * 1000} />
        ))}
      </div>
    </ThemeContext.Provider>
  );
}

document.body.style.margin = 0;
createRoot(document.getElementById('board')).render(<Board {...window.ASKED} />);
