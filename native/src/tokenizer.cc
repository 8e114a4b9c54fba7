#include "tokenizer.h"

#include <algorithm>

#include "unicode.h"

namespace dagserve {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t padded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Calls `emit(begin, end, is_match)` for the matches of a text and for what lies between them.
template <class Emit>
void scan(const Scanner& scanner, std::string_view text, Emit emit) {
  std::size_t gap = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = scanner.match(text, at);
    if (end == Scanner::kNone) {
      at += decode_char(text, at).bytes;
      continue;
    }
    if (at > gap) emit(gap, at, false);
    emit(at, end, true);
    gap = at = end;
  }
  if (text.size() > gap) emit(gap, text.size(), false);
}

// Joins matches and gaps into pieces as the step's behavior says, and calls `emit(begin, end)` for each.
template <class Emit>
class Pieces {
 public:
  Pieces(Behavior behavior, Emit emit) : behavior_(behavior), emit_(emit) {}

  void add(std::size_t begin, std::size_t end, bool is_match) {
    if (behavior_ == Behavior::removed && is_match) return;
    if (behavior_ == Behavior::isolated || behavior_ == Behavior::removed) return emit_(begin, end);
    if (pending_ && joins(is_match)) {
      end_ = end;
    } else {
      flush();
      begin_ = begin;
      end_ = end;
      pending_ = true;
    }
    after_match_ = is_match;
  }
  void flush() {
    if (pending_) emit_(begin_, end_);
    pending_ = false;
  }

 private:
  bool joins(bool is_match) const {
    if (behavior_ == Behavior::contiguous) return is_match == after_match_;
    if (behavior_ == Behavior::merged_with_previous) return is_match && !after_match_;
    return !is_match && after_match_;
  }

  Behavior behavior_;
  Emit emit_;
  bool pending_ = false;
  bool after_match_ = false;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace

// Texts to write to in turn, two for normalizing and two for what is changed later; room to compose.
struct Tokenizer::Workspace {
  std::span<char> texts[4];
  std::span<std::uint64_t> words;
};

// One call of `encode`.
struct Tokenizer::Run {
  std::span<const Open> open;
  bool whole;  // all of the text is open
  Workspace space;
  TokenSink& sink;
  PieceQueue pieces;
};

Tokenizer::Tokenizer(const std::string& path)
    : tables_(path), raw_(tables_.section(Section::raw_trie)), normalized_(tables_.section(Section::normalized_trie)) {
  std::size_t count = 0;
  const auto add = [&](std::span<const Step> steps) {
    for (const Step& step : steps) {
      composes_ = composes_ || step.kind == StepKind::nfc;
      if (step.kind == StepKind::replace || step.kind == StepKind::split)
        scanners_.emplace_back(tables_.section(Section::scanners, count++));
    }
  };
  add(tables_.normalizers());
  add(tables_.transforms());
  add(tables_.splits());
  if (composes_) nfc_ = Nfc(tables_.section(Section::nfc));
}

std::size_t Tokenizer::workspace_bytes(std::size_t text_bytes) const {
  const Options& options = tables_.options();
  const bool changes = options.normalizers + options.transforms > 0;
  const std::size_t grown = options.ratio * text_bytes + options.extra;
  const std::size_t words = composes_ ? Nfc::workspace_words(grown) * sizeof(std::uint64_t) : 0;
  return (changes ? 4 * padded(grown) : 0) + padded(words) + bpe_workspace_bytes(grown);
}

void Tokenizer::encode(std::string_view text, std::span<const Open> open, std::span<std::byte> workspace,
                       TokenSink& sink) const {
  const Options& options = tables_.options();
  const bool changes = options.normalizers + options.transforms > 0;
  const std::size_t grown = options.ratio * text.size() + options.extra;
  std::byte* at = workspace.data();
  const auto take = [&](std::size_t bytes) {
    std::byte* const taken = at;
    at += padded(bytes);
    return taken;
  };
  Workspace space;
  if (changes) {
    for (auto& buffer : space.texts) buffer = {reinterpret_cast<char*>(take(grown)), grown};
  }
  if (composes_) {
    const std::size_t words = Nfc::workspace_words(grown);
    space.words = {reinterpret_cast<std::uint64_t*>(take(words * sizeof(std::uint64_t))), words};
  }
  const std::span<std::byte> merging = workspace.subspan(static_cast<std::size_t>(at - workspace.data()));
  Run run{open,
          open.size() == 1 && open[0].begin == 0 && open[0].end == text.size(),
          space,
          sink,
          {tables_, merging, sink}};
  encode_raw(text, run);
}

void Tokenizer::encode_raw(std::string_view text, Run& run) const {
  std::size_t plain = 0;
  if (!raw_.empty()) {
    for (const Open& part : run.open) {
      for (std::size_t at = part.begin; at < part.end;) {
        const Found found = raw_.find(tables_, text, at, part.end, plain);
        if (found.token == kNoToken) break;
        if (found.begin > plain) encode_normalized(text.substr(plain, found.begin - plain), plain, run);
        run.sink.push(tables_.added()[found.token].id);
        plain = found.end;
        at = found.next;
      }
    }
  }
  if (text.size() > plain) encode_normalized(text.substr(plain), plain, run);
}

void Tokenizer::encode_normalized(std::string_view text, std::size_t offset, Run& run) const {
  const std::string_view normal = apply(tables_.normalizers(), text, offset == 0, 0, run.space);
  const Open everything{0, normal.size()};
  std::size_t plain = 0;
  const auto look = [&](Open part) {
    for (std::size_t at = part.begin; at < part.end;) {
      const Found found = normalized_.find(tables_, normal, at, part.end, plain);
      if (found.token == kNoToken) break;
      if (found.begin > plain) encode_plain(normal.substr(plain, found.begin - plain), offset + plain == 0, run);
      run.sink.push(tables_.added()[found.token].id);
      plain = found.end;
      at = found.next;
    }
  };
  if (!normalized_.empty()) {
    if (run.whole) {
      look(everything);
    } else if (tables_.normalizers().empty()) {
      for (const Open& part : run.open)
        if (part.end > offset && part.begin < offset + text.size())
          look({std::max(part.begin, offset) - offset, std::min(part.end - offset, text.size())});
    }
  }
  if (normal.size() > plain) encode_plain(normal.substr(plain), offset + plain == 0, run);
}

void Tokenizer::encode_plain(std::string_view text, bool at_start, Run& run) const {
  const std::string_view plain = apply(tables_.transforms(), text, at_start, 2, run.space);
  encode_split(plain, 0, plain.data() + plain.size(), run);
  run.pieces.flush();
}

void Tokenizer::encode_split(std::string_view text, std::size_t level, const char* end, Run& run) const {
  const std::span<const Step> splits = tables_.splits();
  if (level == splits.size()) return run.pieces.add(text, end);
  const Step& step = splits[level];
  Pieces pieces(step.behavior, [&](std::size_t begin, std::size_t stop) {
    encode_split(text.substr(begin, stop - begin), level + 1, end, run);
  });
  scan(scanners_[step.scanner], text, [&](std::size_t begin, std::size_t stop, bool is_match) {
    pieces.add(begin, stop, is_match != (step.invert != 0));
  });
  pieces.flush();
}

std::string_view Tokenizer::apply(std::span<const Step> steps, std::string_view text, bool at_start, std::size_t buffer,
                                  Workspace& space) const {
  for (const Step& step : steps) {
    char* const out = space.texts[buffer].data();
    if (step.kind == StepKind::nfc) {
      if (nfc_.is_composed(text)) continue;
      text = {out, nfc_.compose(text, space.words, out)};
    } else if (step.kind == StepKind::replace) {
      text = replace(step, text, out);
    } else {
      const std::string_view prefix = tables_.text(step);
      if (text.empty() || (step.unless != 0 && text.starts_with(prefix)) || (step.first_only != 0 && !at_start))
        continue;
      std::copy(text.begin(), text.end(), std::copy(prefix.begin(), prefix.end(), out));
      text = {out, prefix.size() + text.size()};
    }
    buffer ^= 1;
  }
  return text;
}

std::string_view Tokenizer::replace(const Step& step, std::string_view text, char* out) const {
  const std::string_view content = tables_.text(step);
  char* end = out;
  scan(scanners_[step.scanner], text, [&](std::size_t begin, std::size_t stop, bool is_match) {
    const std::string_view part = is_match ? content : text.substr(begin, stop - begin);
    end = std::copy(part.begin(), part.end(), end);
  });
  return {out, static_cast<std::size_t>(end - out)};
}

}  // namespace dagserve
