// Sorting (within families), folding and filtering of the leaderboard. Without it the page is a plain table.
"use strict";

(() => {
  const table = document.querySelector("table.board");
  if (!table) return;
  const families = [...table.tBodies];
  const members = families.map((family) => [...family.rows].slice(1)); // the first row is the family's name
  const rows = members.flat();
  const headings = [...table.tHead.rows[0].cells];

  const sort = (column) => {
    const heading = headings[column];
    const now = heading.getAttribute("aria-sort");
    const first = heading.dataset.first === "down" ? "descending" : "ascending";
    const other = first === "descending" ? "ascending" : "descending";
    const direction = now === first ? other : first;
    for (const one of headings) one.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction);

    const keys = new Map(rows.map((row) => [row, row.cells[column].dataset.o]));
    const given = [...keys.values()].filter((key) => key !== undefined);
    const numbers = given.every((key) => key !== "" && !Number.isNaN(Number(key)));
    const sign = direction === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // empty cells last
      return sign * (numbers ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true }));
    };
    families.forEach((family, index) => family.append(...members[index].sort(compare)));
  };

  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.querySelector(".head").childNodes);
    button.addEventListener("click", () => sort(column));
    heading.replaceChildren(button);
  });

  for (const family of families) {
    const name = family.querySelector(".family .head");
    const button = document.createElement("button");
    button.type = "button";
    button.append(...name.childNodes);
    const fold = (folded) => {
      family.classList.toggle("folded", folded);
      button.setAttribute("aria-expanded", String(!folded));
    };
    button.addEventListener("click", () => fold(!family.classList.contains("folded")));
    name.replaceWith(button);
    fold(family.classList.contains("planned"));
  }

  const form = document.querySelector(".filters");
  const suited = [...table.querySelectorAll("thead [data-suite]")].map((one) => [headings.indexOf(one), one.dataset.suite]);
  const filter = () => {
    const find = form.elements.find.value.trim().toLowerCase();
    const [hardware, suite, standing] = ["hardware", "suite", "standing"].map((name) => form.elements[name].value);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !(
        (!hardware || row.dataset.hardware === hardware) &&
        (!suite || row.dataset.suite.split(" ").includes(suite)) &&
        (!standing || row.dataset.standing === standing) &&
        (!find || row.textContent.toLowerCase().includes(find))
      );
      shown += !row.hidden;
    }
    table.classList.toggle("filtered", Boolean(find || hardware || suite || standing)); // shows what folded families hold
    families.forEach((family, index) => (family.rows[0].hidden = members[index].every((row) => row.hidden)));
    for (const [column, of] of suited) {
      for (const row of [table.tHead.rows[0], ...rows]) row.cells[column].classList.toggle("other-suite", suite !== "" && of !== suite);
    }
    for (const box of form.querySelectorAll("[name=columns]")) table.classList.toggle(`no-${box.value}`, !box.checked);
    form.querySelector("output").textContent = `${shown} of ${rows.length} rows`;
  };
  for (const event of ["input", "change"]) form.addEventListener(event, filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
})();
