"use strict";
// replaces the parts of the page by those that the server draws; without scripts the page asks again by itself
(() => {
  const lost = document.getElementById("lost");
  const source = new EventSource("live");
  source.onmessage = (event) => {
    lost.hidden = true;
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      const part = document.getElementById(name);
      if (part !== null) part.innerHTML = html;
    }
  };
  source.onerror = () => { lost.hidden = false; };
})();
