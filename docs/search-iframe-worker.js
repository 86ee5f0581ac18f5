// What the theme's search lacks. It starts a Worker, so this is a Worker that does more.

// Pages opened as files: browsers refuse to start a Worker there, so its script runs in a hidden frame. That script
// looks for the name IFrameWorker to tell where it is, and awaits importScripts.
class IFrameWorker extends EventTarget {
  constructor(script) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    const loaded = new Promise((resolve) => frame.addEventListener("load", resolve, { once: true }))
    document.body.append(frame)
    this.started = loaded.then(async () => {
      const inside = frame.contentWindow
      const load = (source) =>
        new Promise((resolve, reject) => {
          const tag = inside.document.createElement("script")
          Object.assign(tag, { src: source, onload: resolve, onerror: reject })
          inside.document.body.append(tag)
        })
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source)
      }
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      await load(script)
      return inside
    })
  }

  async postMessage(data) {
    const inside = await this.started
    inside.dispatchEvent(new MessageEvent("message", { data }))
  }
}
const asFile = location.protocol === "file:"
if (asFile) window.IFrameWorker = IFrameWorker

// Options are searched as they are typed: without this, `--eta` asks for pages without the word.
window.Worker = class extends (asFile ? IFrameWorker : Worker) {
  postMessage(message) {
    if (typeof message.data === "string") message = { ...message, data: message.data.replace(/(^|\s)--(?=\w)/g, "$1") }
    return super.postMessage(message)
  }
}
