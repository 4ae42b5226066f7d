// What the browser keeps for this page. Where it refuses to keep anything, the page works and forgets.

/** A value as it was kept under this name, or null. */
export function kept(storage, name) {
  try {
    return JSON.parse(storage().getItem(name));
  } catch {
    return null;
  }
}

/** Keeps a value; undefined removes it. Whether that worked: there is a limit on what one page may keep. */
export function keep(storage, name, value) {
  try {
    if (value === undefined) storage().removeItem(name);
    else storage().setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// Named by functions: where storage is switched off, already asking for it raises.
export const thisTab = () => sessionStorage;
export const thisBrowser = () => localStorage;
