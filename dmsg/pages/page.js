"use strict";
// replaces the parts of the page by those that the server draws; without scripts the page asks again by itself
(() => {
  const SILENCE = 10000;  // milliseconds; something comes every two seconds
  const AGAIN = 3000;
  let source = null;
  let heard = Date.now();
  const show = (lost) => {
    document.getElementById("lost").hidden = !lost;
    document.body.classList.toggle("lost", lost);
  };
  const open = () => {
    if (source !== null) source.close();
    source = new EventSource("live");
    source.onmessage = (event) => {
      heard = Date.now();
      show(false);
      for (const [name, html] of Object.entries(JSON.parse(event.data))) {
        const part = document.getElementById(name);
        if (part !== null) part.innerHTML = html;
      }
    };
    source.onerror = () => show(true);
  };
  open();
  setInterval(() => {
    // an answer that is no stream ends the source for good; one that is silent may never come back
    const silent = Date.now() - heard > SILENCE;
    if (silent) show(true);
    if (source.readyState === EventSource.CLOSED || silent) {
      heard = Date.now() - SILENCE + AGAIN;
      open();
    }
  }, AGAIN);
})();
