"""The style sheet of the report.

Colours are variables, so that dark screens and paper change only those. Names of classes are those that ``sections``,
``charts`` and ``mesh`` give to elements.
"""

from __future__ import annotations

STYLE = """
:root{--page:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5d6878;--line:#dde2e9;--link:#0b6aa8;
--loss:#0b6aa8;--validation:#d1495b;--rate:#7a55c7;--speed:#0f8a6d;--compute:#3b7dd8;--halo:#e0942f;
--gradients:#8b5fd3;--data:#2aa38b;--memory:#5b7fa6;--good:#14784f;--warn:#9a5b00;--bad:#c0203a;--tile:#fff}
@media (prefers-color-scheme:dark){:root{--page:#11161d;--card:#1a212b;--ink:#e4e9f0;--soft:#9aa6b6;--line:#303a47;
--link:#6cb8f0;--loss:#5fb2f2;--validation:#ff7f8f;--rate:#b79bff;--speed:#4fd1ae;--compute:#5b9bf0;--halo:#f0b055;
--gradients:#b190f5;--data:#4cc9ae;--memory:#7fa3cc;--good:#5fd6a0;--warn:#f0b055;--bad:#ff7f8f;--tile:#1a212b}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem clamp(.8rem,3vw,2.2rem) 3rem;max-width:1180px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.9rem;line-height:1.15;margin:.1rem 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.2rem 0 .7rem}
h3{font-size:.95rem;margin:0 0 .5rem;font-weight:600}
p{margin:.3rem 0 .8rem}
a{color:var(--link)}
.over{color:var(--soft);margin:0;overflow-wrap:anywhere}
.pill{display:inline-block;padding:0 .6em;margin-left:.5em;border:1px solid;border-radius:1em;font-size:.85em}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:0 0 1rem}
.facts div,.card,details,.mesh{background:var(--card);border:1px solid var(--line);border-radius:8px}
.facts div{padding:.6rem .8rem}
dt{color:var(--soft);font-size:.82rem}
dd{margin:0;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.9rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,23rem),1fr));gap:.9rem;align-items:stretch}
.three{grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr))}
dd small{display:block;font-weight:400;line-height:1.3}
.card{padding:.8rem .9rem;min-width:0;max-width:36rem;container-type:inline-size}
.note{color:var(--soft);font-size:.85rem;margin:.4rem 0 0}
.chart{display:block;width:100%;height:auto;overflow:visible;color:var(--ink)}
.small{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,15rem),1fr));gap:.9rem}
.small figure{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem}
figure{margin:0;min-width:0}
figcaption,small{font-size:.85rem;color:var(--soft)}
svg text{font-family:inherit;fill:currentColor}
.tick{font-size:11.5px;fill:var(--soft)!important;font-variant-numeric:tabular-nums}
.label{font-size:12px;fill:var(--soft)!important}
@container (max-width:24rem){.tick{font-size:14px}.label{font-size:14.5px}}
.mid{text-anchor:middle}.end{text-anchor:end}
.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.frame{fill:none;stroke:var(--line)}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.faint{stroke-width:1;opacity:.38}
.curve.loss{stroke:var(--loss)}.curve.validation{stroke:var(--validation)}
.curve.rate{stroke:var(--rate)}.curve.speed{stroke:var(--speed)}
.dot{stroke:var(--card);stroke-width:1}
.dot.loss{fill:var(--loss)}.dot.validation{fill:var(--validation)}.dot.rate{fill:var(--rate)}
.dot.speed{fill:var(--speed)}
.cross{stroke:var(--bad);stroke-width:1.6;fill:none}
.strip .area{fill:transparent}.strip .hair,.strip .spot{opacity:0;pointer-events:none}
.strip .hair{stroke:var(--soft)}.strip .spot{fill:currentColor}
.strip:hover .hair{opacity:.6}.strip:hover .spot{opacity:1}
.area-of{opacity:.9}
.area-of.compute{fill:var(--compute)}.area-of.halo{fill:var(--halo)}
.area-of.gradients{fill:var(--gradients)}.area-of.data{fill:var(--data)}
.bar.memory{fill:var(--memory)}
.diagonal{stroke:var(--soft);stroke-dasharray:4 4}
.point{fill:var(--loss);fill-opacity:.6}
.cell{fill:var(--loss)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.4rem 0 0;font-size:.85rem;color:var(--soft)}
.legend span{display:inline-flex;align-items:center;gap:.4em}
i{display:inline-block;width:.85em;height:.85em;border-radius:2px;flex:none}
.legend b{display:inline-block;width:7rem;height:.8em;border-radius:2px}
i.key{margin-right:.1em}
td i.key{margin-right:.5em}
i.loss{background:var(--loss);opacity:.45;height:2px}i.loss.strong{opacity:1;height:3px}
i.validation{background:var(--validation);border-radius:50%;width:.6em;height:.6em}
.part.compute,i.compute{background:var(--compute)}.part.halo,i.halo{background:var(--halo)}
.part.gradients,i.gradients{background:var(--gradients)}.part.data,i.data{background:var(--data)}
.stack{display:flex;height:2rem;border-radius:5px;overflow:hidden;margin:.2rem 0 .6rem;background:var(--line)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
.shares{width:100%}
th{color:var(--soft);font-weight:500;text-align:right}
td,th{padding:.22rem .7rem;border-bottom:1px solid var(--line);text-align:right}
.shares td{white-space:nowrap}
.shares td:first-child{text-align:left;padding-left:0;white-space:normal}
.scroll{overflow-x:auto;max-width:100%}
.panels{display:grid;grid-template-columns:repeat(4,1fr);gap:.7rem;margin:.8rem 0}
@media (max-width:40rem){.panels{grid-template-columns:repeat(2,1fr)}}
.panels img{display:block;width:100%;height:auto;image-rendering:pixelated;border-radius:4px}
.meshes,.layers{display:flex;flex-wrap:wrap;gap:.9rem}
.layers div{display:flex;flex-direction:column;align-items:center;max-width:100%}
.mesh{padding:.7rem .5rem;max-width:100%}
.mesh figcaption{text-align:center}
.box{display:block;max-width:100%;height:auto;color:var(--ink)}
.tile{color:var(--hue)}.tile .face,.tile .lid,.tile .cheek{fill:var(--hue);stroke:var(--card);stroke-width:1.5}
.tile .lid{fill-opacity:.62}.tile .cheek{fill-opacity:.42}
.tile:hover .face{fill-opacity:.8}
.tile .rank{fill:#fff;font-weight:600;pointer-events:none}
.hue0{--hue:#3b76c4}.hue1{--hue:#c2662d}.hue2{--hue:#2c8f74}.hue3{--hue:#8a5cc0}
.hue4{--hue:#b3426a}.hue5{--hue:#6d7f2a}.hue6{--hue:#2b8ba3}.hue7{--hue:#8b6b4a}
details{padding:.6rem .9rem;margin-top:.9rem}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font-size:.85rem;margin:.6rem 0 0}
footer{margin-top:2.5rem;padding-top:.8rem;border-top:1px solid var(--line);color:var(--soft);font-size:.85rem}
@media print{:root{--page:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#ccc}
body{max-width:none;padding:0;print-color-adjust:exact;-webkit-print-color-adjust:exact}nav{display:none}
.cards{grid-template-columns:1fr 1fr}.card,figure,.panels,.facts{break-inside:avoid}h2{break-after:avoid}}
""".strip()
