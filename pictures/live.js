"use strict";
(function () {
  const main = document.getElementById("main");
  const status = document.getElementById("live");
  const say = (text) => { if (status.textContent !== text) status.textContent = text; };
  let tag = "";
  async function look() {
    try {
      const answer = await fetch(main.dataset.live, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") || "";
        const text = await answer.text();
        const open = Array.from(main.querySelectorAll("section[id]:has(details[open])"), (s) => s.id);
        const focused = document.activeElement && document.activeElement.closest("section[id]");
        main.innerHTML = text;
        for (const id of open) {
          const details = document.querySelector("#" + CSS.escape(id) + " details");
          if (details) details.open = true;
        }
        if (focused) {
          const again = document.querySelector("#" + CSS.escape(focused.id) + " summary");
          if (again) again.focus({ preventScroll: true });
        }
      }
      const over = answer.headers.get("X-Run-Over");
      say(over ? "the run is over: " + over : "live: this page follows the run");
      if (over) return;
    } catch (error) {
      say("no answer from coterie runs watch: this is the last state received");
    }
    setTimeout(look, 2000);
  }
  setTimeout(look, 2000);
})();
