#include "request_decoder.h"

#include <simdjson.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cfloat>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "json_place.h"

namespace dagserve {

using simdjson::error_code;
using simdjson::ondemand::json_type;
using Json = simdjson::ondemand::value;

static_assert(kBodyPadding >= simdjson::SIMDJSON_PADDING);

namespace {

constexpr std::size_t kMaxFields = 64;
constexpr std::size_t kDepth = 64;  // levels a parser tracks; fields have two or three
constexpr int kEscapedByte = 6;     // longest JSON form of a byte of text, \u0000
constexpr std::size_t kFieldBytes = 65536;
constexpr std::size_t kLongestName = 40;

// Where a value stands in the body.
struct Place {
  std::string_view path;
  std::int64_t row = -1;
};

const char* what_is_wrong(error_code error) {
  switch (error) {
    case simdjson::EMPTY:
      return "it is empty";
    case simdjson::UTF8_ERROR:
      return "the text is not UTF-8";
    case simdjson::UNESCAPED_CHARS:
      return "a control character is not escaped";
    case simdjson::UNCLOSED_STRING:
      return "a string is not closed";
    case simdjson::STRING_ERROR:
      return "a string has a wrong escape or half of a surrogate pair";
    case simdjson::NUMBER_ERROR:
    case simdjson::BIGINT_ERROR:
      return "a number is malformed or too large";
    case simdjson::DEPTH_ERROR:
      return "it is nested too deep";
    default:
      return "a value, comma, colon or bracket is missing or wrong (NaN and Infinity are not JSON)";
  }
}

// Levenshtein distance of two short names; of longer ones it says that they are far apart.
std::size_t distance(std::string_view a, std::string_view b) {
  if (a.size() > kLongestName || b.size() > kLongestName) return kLongestName;
  std::array<std::size_t, kLongestName + 1> row{};
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

const char* kind_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::text:
      return "text";
    case Dtype::boolean:
      return "true or false";
    case Dtype::f32:
      return "a number";
    default:
      return "an integer";
  }
}

const char* list_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::text:
      return "a list of texts";
    case Dtype::boolean:
      return "a list of true or false";
    case Dtype::f32:
      return "a list of numbers";
    default:
      return "a list of integers";
  }
}

// How many bytes of a name a message shows: no character is cut.
int shown(std::string_view name) {
  std::size_t size = std::min(name.size(), kLongestName);
  while (size > 0 && size < name.size() && (static_cast<unsigned char>(name[size]) & 0xC0) == 0x80) --size;
  return static_cast<int>(size);
}

// One body on its way into a slot. Every member function returns whether to go on; where not, the status says why.
class Reading {
 public:
  Reading(const Plan& plan, const EndpointSpec& endpoint, std::string_view body, std::span<Tensor> inputs,
          Status& status)
      : plan_(plan), endpoint_(endpoint), body_(body), inputs_(inputs), status_(status) {}

  bool run(simdjson::ondemand::parser& parser) {
    simdjson::ondemand::document document;
    const std::size_t capacity = body_.size() + kBodyPadding;
    if (const error_code error = parser.iterate(body_.data(), body_.size(), capacity).get(document))
      return refuse_text(error);
    json_type type{};
    if (const error_code error = document.type().get(type)) return malformed(error, {});
    if (type != json_type::object) return fail("the body must be a JSON object");
    simdjson::ondemand::object object;
    if (const error_code error = document.get_object().get(object)) return malformed(error, {});
    if (!read_object(object, "")) return false;
    if (!document.at_end()) return fail("the body is not valid JSON: text follows the object");
    return complete();
  }

 private:
  bool read_object(simdjson::ondemand::object& object, std::string_view prefix) {
    for (auto&& item : object) {
      simdjson::ondemand::field field;
      std::string_view key;
      if (const error_code error = std::move(item).get(field)) return malformed(error, {last_path_});
      if (const error_code error = field.unescaped_key().get(key)) return malformed(error, {last_path_});
      Json value = field.value();
      if (!read_field(key, prefix, value)) return false;
    }
    return true;
  }

  bool read_field(std::string_view key, std::string_view prefix, Json& value) {
    if (key.find('.') != std::string_view::npos) return unknown(key, prefix);  // a path, which only this table has
    for (std::size_t i = 0; i < endpoint_.fields.size(); ++i) {
      const FieldSpec& spec = endpoint_.fields[i];
      const std::string_view path = spec.path;
      if (!path.starts_with(prefix) || path.substr(prefix.size(), key.size()) != key) continue;
      const std::string_view rest = path.substr(prefix.size() + key.size());
      last_path_ = path;
      if (rest.empty()) return is_object_of(path, value) ? read_object_of(i, value) : read_value(i, value);
      if (rest[0] == '.') return read_inside(path.substr(0, prefix.size() + key.size() + 1), i, value);
    }
    return unknown(key, prefix);
  }

  // An object whose fields have paths below `prefix`; `first` is the first of them.
  bool read_inside(std::string_view prefix, std::size_t first, Json& value) {
    const std::string_view name = prefix.substr(0, prefix.size() - 1);
    json_type type{};
    simdjson::ondemand::object object;
    if (const error_code error = value.type().get(type)) return malformed(error, {name});
    if (type == json_type::null)
      return value.is_null().error() == simdjson::SUCCESS || malformed(simdjson::N_ATOM_ERROR, {name});
    if (type != json_type::object) return wrong({name}, "an object");
    if (objects_[first]) return fail("%.*s is given twice; give it once", static_cast<int>(name.size()), name.data());
    objects_[first] = true;
    if (const error_code error = value.get_object().get(object)) return malformed(error, {name});
    return read_object(object, prefix);
  }

  // Whether it is an object and there are fields inside.
  bool is_object_of(std::string_view path, Json& value) const {
    json_type type{};
    return inside(path) != nullptr && value.type().get(type) == simdjson::SUCCESS && type == json_type::object;
  }

  // A field inside the object of that path.
  const FieldSpec* inside(std::string_view path) const {
    const auto found = std::ranges::find_if(endpoint_.fields, [&](const FieldSpec& spec) {
      return spec.path.size() > path.size() && spec.path.starts_with(path) && spec.path[path.size()] == '.';
    });
    return found == endpoint_.fields.end() ? nullptr : &*found;
  }

  bool read_object_of(std::size_t field, Json& value) {
    const std::string_view path = endpoint_.fields[field].path;
    if (given_[field]) return fail("%s is given twice; give it once", endpoint_.fields[field].path.c_str());
    given_[field] = true;
    const auto first = static_cast<std::size_t>(inside(path) - endpoint_.fields.data());
    return read_inside(std::string_view(endpoint_.fields[first].path).substr(0, path.size() + 1), first, value);
  }

  bool read_value(std::size_t field, Json& value) {
    const FieldSpec& spec = endpoint_.fields[field];
    if (given_[field]) return fail("%s is given twice; give it once", spec.path.c_str());
    given_[field] = true;
    json_type type{};
    if (const error_code error = value.type().get(type)) return malformed(error, {spec.path});
    const bool null = type == json_type::null;
    if (null && value.is_null().error() != simdjson::SUCCESS) return malformed(simdjson::N_ATOM_ERROR, {spec.path});
    switch (spec.kind) {
      case FieldSpec::Kind::input:
        return read_input(spec, value, type);
      case FieldSpec::Kind::model:
        return null || read_model(spec, value);
      case FieldSpec::Kind::constant:
        return null || read_constant(spec, value, type);
      case FieldSpec::Kind::fixed:
        return null || fixed(spec);
      case FieldSpec::Kind::ignored:
        if (const error_code error = walk(value)) return malformed(error, {spec.path});
        return true;
      case FieldSpec::Kind::term:
        return null || read_terms(spec, value, type);
    }
    return true;
  }

  // What is not used must be JSON all the same.
  static error_code walk(Json& value) {
    json_type type{};
    if (const error_code error = value.type().get(type)) return error;
    if (type == json_type::array) {
      simdjson::ondemand::array array;
      if (const error_code error = value.get_array().get(array)) return error;
      for (auto&& item : array) {
        Json element;
        if (const error_code error = item.get(element)) return error;
        if (const error_code error = walk(element)) return error;
      }
      return simdjson::SUCCESS;
    }
    if (type == json_type::object) {
      simdjson::ondemand::object object;
      if (const error_code error = value.get_object().get(object)) return error;
      for (auto&& item : object) {
        simdjson::ondemand::field field;
        std::string_view key;
        if (const error_code error = std::move(item).get(field)) return error;
        if (const error_code error = field.unescaped_key().get(key)) return error;
        Json element = field.value();
        if (const error_code error = walk(element)) return error;
      }
      return simdjson::SUCCESS;
    }
    if (type == json_type::string) return value.get_string().error();
    if (type == json_type::number) return value.get_double().error();
    if (type == json_type::boolean) return value.get_bool().error();
    return value.is_null().error();
  }

  bool read_terms(const FieldSpec& spec, Json& value, json_type type) {
    if (type == json_type::object) return neither(spec, kind_of_values(spec));
    if (type != json_type::array) return read_term(spec, {spec.path}, value, type);
    simdjson::ondemand::array array;
    if (const error_code error = value.get_array().get(array)) return malformed(error, {spec.path});
    std::int64_t row = 0;
    for (auto&& item : array) {
      Json element;
      json_type kind{};
      if (const error_code error = item.get(element)) return malformed(error, {spec.path, row});
      if (const error_code error = element.type().get(kind)) return malformed(error, {spec.path, row});
      if (!read_term(spec, {spec.path, row}, element, kind)) return false;
      ++row;
    }
    return row > 0 || spec.empty_is_absent || fail("%s has 0 entries; it must have at least 1", spec.path.c_str());
  }

  static Dtype kind_of_values(const FieldSpec& spec) {
    return spec.expected == "text" ? Dtype::text : spec.expected == "bool" ? Dtype::boolean : Dtype::f32;
  }

  bool read_term(const FieldSpec& spec, const Place& place, Json& value, json_type type) {
    char number[32];
    std::string_view text;
    if (spec.expected == "text") {
      if (type != json_type::string) return wrong(place, "text");
      if (const error_code error = value.get_string().get(text)) return malformed(error, place);
    } else if (spec.expected == "bool") {
      bool truth = false;
      if (type != json_type::boolean) return wrong(place, "true or false");
      if (const error_code error = value.get_bool().get(truth)) return malformed(error, place);
      text = truth ? "true" : "false";
    } else {
      double real = 0;
      if (type != json_type::number) return wrong(place, "a number");
      if (const error_code error = value.get_double().get(real)) return malformed(error, place);
      text = {number, static_cast<std::size_t>(std::to_chars(number, std::end(number), real).ptr - number)};
    }
    return add_term(spec, text);
  }

  bool add_term(const FieldSpec& spec, std::string_view value) {
    Tensor& terms = inputs_[spec.input];
    const std::string& input = plan_.inputs[spec.input].name;
    if (!terms.present) {
      terms.present = true;
      terms.shape[0] = terms.offsets[0] = 0;
    }
    const std::int64_t row = terms.shape[0];
    if (row == terms.bound[0])
      return fail("%s: all attributes have more than %lld values; send fewer or raise the bound of %s",
                  spec.path.c_str(), static_cast<long long>(row), input.c_str());
    const std::string_view name = std::string_view(spec.path).substr(spec.path.rfind('.') + 1);
    std::int64_t at = terms.offsets[row];
    if (std::ssize(name) + 1 + std::ssize(value) > terms.capacity - at)
      return fail("%s: all attributes have more than %lld bytes of values; shorten them or raise the max_bytes of %s",
                  spec.path.c_str(), static_cast<long long>(terms.capacity), input.c_str());
    for (const std::string_view part : {name, std::string_view("="), value}) {
      std::memcpy(static_cast<char*>(terms.data) + at, part.data(), part.size());
      at += std::ssize(part);
    }
    terms.offsets[row + 1] = at;
    ++terms.shape[0];
    return true;
  }

  bool read_model(const FieldSpec& spec, Json& value) {
    std::string_view name;
    const error_code error = value.get_string().get(name);
    if (error == simdjson::INCORRECT_TYPE) return wrong({spec.path}, "text");
    if (error) return malformed(error, {spec.path});
    if (name == spec.expected) return true;
    status_.fail(Code::unknown_model, "model '%.*s' is not served here; this is '%s'", shown(name), name.data(),
                 spec.expected.c_str());
    return false;
  }

  bool read_constant(const FieldSpec& spec, Json& value, json_type type) {
    bool same = false;
    if (type == json_type::number) {
      double number = 0;
      double expected = 0;
      if (const error_code error = value.get_double().get(number)) return malformed(error, {spec.path});
      const char* const end = spec.expected.data() + spec.expected.size();
      same = std::from_chars(spec.expected.data(), end, expected).ec == std::errc() && number == expected;
    } else if (type == json_type::boolean) {
      bool truth = false;
      if (const error_code error = value.get_bool().get(truth)) return malformed(error, {spec.path});
      same = spec.expected == (truth ? "true" : "false");
    } else if (type == json_type::string) {
      std::string_view text;
      if (const error_code error = value.get_string().get(text)) return malformed(error, {spec.path});
      const std::string_view expected = spec.expected;  // JSON too: a text stands in quotes
      same = expected.starts_with('"') && expected.substr(1, expected.size() - 2) == text;
    }
    return same || fail("%s must be %s: %s", spec.path.c_str(), spec.expected.c_str(), spec.reason.c_str());
  }

  bool read_input(const FieldSpec& spec, Json& value, json_type type) {
    const InputSpec& input = plan_.inputs[spec.input];
    Tensor& tensor = inputs_[spec.input];
    if (type == json_type::null && (input.optional || input.has_default)) return true;
    if (tensor.present) return fail("%s is given under two names; give one of them", spec.path.c_str());
    tensor.present = true;
    if (tensor.dtype == Dtype::text) tensor.offsets[0] = 0;
    if (tensor.rank == 0) return read_one({spec.path}, value, tensor, 0);
    if (tensor.rank != 1) return fail("%s has a rank that requests cannot carry", spec.path.c_str());
    if (type == json_type::array) return read_list(spec, value, tensor);
    if (!spec.one_or_many) return wrong({spec.path}, list_of(tensor.dtype));
    if (type == json_type::object || type == json_type::null) return neither(spec, tensor.dtype);
    tensor.shape[0] = 1;
    return read_one({spec.path}, value, tensor, 0);
  }

  bool read_list(const FieldSpec& spec, Json& value, Tensor& tensor) {
    simdjson::ondemand::array array;
    if (const error_code error = value.get_array().get(array)) return malformed(error, {spec.path});
    std::int64_t row = 0;
    for (auto&& item : array) {
      Json element;
      if (const error_code error = item.get(element)) return malformed(error, {spec.path, row});
      if (row < tensor.bound[0] && !read_one({spec.path, row}, element, tensor, row)) return false;
      ++row;
    }
    if (row == 0 && spec.empty_is_absent) {
      tensor.present = false;
      return true;
    }
    if (row < 1 || row > tensor.bound[0])
      return fail("%s has %lld entries; it must have from 1 to %lld", spec.path.c_str(), static_cast<long long>(row),
                  static_cast<long long>(tensor.bound[0]));
    tensor.shape[0] = row;
    return true;
  }

  bool read_one(const Place& place, Json& value, Tensor& tensor, std::int64_t index) {
    json_type type{};
    if (const error_code error = value.type().get(type)) return malformed(error, place);
    switch (tensor.dtype) {
      case Dtype::text:
        return read_text(place, value, type, tensor, index);
      case Dtype::f32:
        return read_real(place, value, type, tensor, index);
      case Dtype::boolean:
        return read_truth(place, value, type, tensor, index);
      default:
        return read_integer(place, value, type, tensor, index);
    }
  }

  bool read_text(const Place& place, Json& value, json_type type, Tensor& tensor, std::int64_t row) {
    if (type == json_type::number || type == json_type::array)
      return wrong(place, "text; token ids are not taken, send texts");
    if (type != json_type::string) return wrong(place, "text");
    std::string_view text;
    if (const error_code error = value.get_string().get(text)) return malformed(error, place);
    const std::int64_t start = tensor.offsets[row];
    if (std::ssize(text) > tensor.capacity - start)
      return fail("%.*s has more than %lld bytes of text; shorten it or raise the input's max_bytes",
                  static_cast<int>(place.path.size()), place.path.data(), static_cast<long long>(tensor.capacity));
    std::memcpy(static_cast<char*>(tensor.data) + start, text.data(), text.size());
    tensor.offsets[row + 1] = start + std::ssize(text);
    return true;
  }

  bool read_real(const Place& place, Json& value, json_type type, Tensor& tensor, std::int64_t index) {
    double number = 0;
    if (type != json_type::number) return wrong(place, "a number");
    if (const error_code error = value.get_double().get(number)) return malformed(error, place);
    if (std::abs(number) > FLT_MAX) return wrong(place, "a number that fits 32 bits");
    tensor.as<float>()[index] = static_cast<float>(number);
    return true;
  }

  bool read_truth(const Place& place, Json& value, json_type type, Tensor& tensor, std::int64_t index) {
    bool truth = false;
    if (type != json_type::boolean) return wrong(place, "true or false");
    if (const error_code error = value.get_bool().get(truth)) return malformed(error, place);
    store_integer(tensor, index, truth);
    return true;
  }

  bool read_integer(const Place& place, Json& value, json_type type, Tensor& tensor, std::int64_t index) {
    std::int64_t number = 0;
    const bool whole = type == json_type::number && value.get_int64().get(number) == simdjson::SUCCESS;
    if (!whole || !integer_fits(tensor.dtype, number)) {
      char wanted[48];
      std::snprintf(wanted, sizeof(wanted), "an integer of type %s", dtype_name(tensor.dtype));
      return wrong(place, wanted);
    }
    store_integer(tensor, index, number);
    return true;
  }

  // What the body left out.
  bool complete() {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const InputSpec& input = plan_.inputs[i];
      if (inputs_[i].present) continue;
      if (input.has_default) {
        fill_default(input, inputs_[i]);
        inputs_[i].present = true;
      } else if (!input.optional) {
        return fail("%s is missing; give it", name_of(static_cast<int>(i)));
      }
    }
    return true;
  }

  // What the body calls an input.
  const char* name_of(int input) const {
    for (const FieldSpec& spec : endpoint_.fields)
      if (spec.kind == FieldSpec::Kind::input && spec.input == input) return spec.path.c_str();
    return plan_.inputs[input].name.c_str();
  }

  bool unknown(std::string_view key, std::string_view prefix) {
    const auto object =
        std::ranges::find(endpoint_.fields, prefix.substr(0, prefix.find_last_of('.')), &FieldSpec::path);
    if (object != endpoint_.fields.end() && object->kind == FieldSpec::Kind::fixed) return fixed(*object);
    if (object != endpoint_.fields.end()) return unknown_attribute(key, prefix);
    const FieldSpec* best = nullptr;
    std::size_t nearest = std::numeric_limits<std::size_t>::max();
    for (const FieldSpec& spec : endpoint_.fields) {
      if (!spec.path.starts_with(prefix)) continue;
      const std::string_view name = std::string_view(spec.path).substr(prefix.size());
      const std::size_t far = distance(key, name);
      if (far < nearest && far <= std::max<std::size_t>(1, std::min(key.size(), name.size()) / 3)) {
        nearest = far;
        best = &spec;
      }
    }
    const int before = static_cast<int>(prefix.size());
    if (best == nullptr)
      return fail("unknown field '%.*s%.*s'; remove it", before, prefix.data(), shown(key), key.data());
    return fail("unknown field '%.*s%.*s'; did you mean '%s'?", before, prefix.data(), shown(key), key.data(),
                best->path.c_str());
  }

  bool fixed(const FieldSpec& spec) {
    return fail("%s is fixed by this service's manifest; leave it out", spec.path.c_str());
  }

  bool unknown_attribute(std::string_view key, std::string_view prefix) {
    char there[384] = "";
    std::size_t used = 0;
    for (const FieldSpec& spec : endpoint_.fields) {
      if (!spec.path.starts_with(prefix)) continue;
      const char* const kind = spec.kind == FieldSpec::Kind::term ? spec.expected.c_str() : "text";
      used += static_cast<std::size_t>(std::snprintf(there + used, sizeof(there) - used, "%s%s (%s)", used ? ", " : "",
                                                     spec.path.c_str() + prefix.size(), kind));
      if (used >= sizeof(there)) break;
    }
    return fail("unknown attribute '%.*s%.*s'; there is %s", static_cast<int>(prefix.size()), prefix.data(), shown(key),
                key.data(), there);
  }

  bool neither(const FieldSpec& spec, Dtype dtype) {
    const char* const one = dtype == Dtype::text ? "a text" : kind_of(dtype);
    return fail("%s must be %s or %s", spec.path.c_str(), one, list_of(dtype));
  }

  bool wrong(const Place& place, const char* wanted) {
    const int size = static_cast<int>(place.path.size());
    if (place.row < 0) return fail("%.*s must be %s", size, place.path.data(), wanted);
    return fail("%.*s[%lld] must be %s", size, place.path.data(), static_cast<long long>(place.row), wanted);
  }

  // Not JSON, found while a value was read.
  bool malformed(error_code error, const Place& place) {
    const int size = static_cast<int>(place.path.size());
    if (size == 0) return fail("the body is not valid JSON: %s", what_is_wrong(error));
    if (place.row < 0)
      return fail("the body is not valid JSON at or after %.*s: %s", size, place.path.data(), what_is_wrong(error));
    return fail("the body is not valid JSON at %.*s[%lld]: %s", size, place.path.data(),
                static_cast<long long>(place.row), what_is_wrong(error));
  }

  // Not JSON, found before any value was read: bad text has its place looked up.
  bool refuse_text(error_code error) {
    const std::size_t at = find_bad_text(body_);
    if (at == std::string_view::npos) return malformed(error, {});
    char place[96];
    json_place(body_, at, place);
    return fail("the body is not valid JSON at byte %zu%s%s: %s", at, place[0] ? ", " : "", place,
                what_is_wrong(error));
  }

  __attribute__((format(printf, 2, 3))) bool fail(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    status_.fail_with(Code::invalid_request, format, arguments);
    va_end(arguments);
    return false;
  }

  const Plan& plan_;
  const EndpointSpec& endpoint_;
  std::string_view body_;
  std::span<Tensor> inputs_;
  Status& status_;
  std::bitset<kMaxFields> given_, objects_;
  std::string_view last_path_;
};

}  // namespace

std::size_t body_limit(const Plan& plan) {
  std::int64_t bytes = 0;
  for (const InputSpec& input : plan.inputs) bytes += plan.tensors[input.tensor].capacity;
  return kFieldBytes + kEscapedByte * static_cast<std::size_t>(bytes);
}

bool integer_fits(Dtype dtype, std::int64_t value) noexcept {
  if (dtype == Dtype::i32) return value >= INT32_MIN && value <= INT32_MAX;
  return dtype != Dtype::u8 || (value >= 0 && value <= 255);
}

void store_integer(Tensor& tensor, std::int64_t index, std::int64_t value) noexcept {
  switch (tensor.dtype) {
    case Dtype::i64:
      tensor.as<std::int64_t>()[index] = value;
      return;
    case Dtype::i32:
      tensor.as<std::int32_t>()[index] = static_cast<std::int32_t>(value);
      return;
    default:
      tensor.as<std::uint8_t>()[index] = static_cast<std::uint8_t>(value);
  }
}

void fill_default(const InputSpec& input, Tensor& tensor) noexcept {
  if (tensor.dtype == Dtype::text) {
    std::int64_t at = tensor.offsets[0] = 0;
    for (std::size_t i = 0; i < input.texts.size(); ++i) {
      std::memcpy(static_cast<char*>(tensor.data) + at, input.texts[i].data(), input.texts[i].size());
      tensor.offsets[i + 1] = at += static_cast<std::int64_t>(input.texts[i].size());
    }
    if (tensor.rank == 1) tensor.shape[0] = static_cast<std::int64_t>(input.texts.size());
    return;
  }
  for (std::size_t i = 0; i < input.integers.size(); ++i)
    store_integer(tensor, static_cast<std::int64_t>(i), input.integers[i]);
  for (std::size_t i = 0; i < input.reals.size(); ++i) tensor.as<float>()[i] = static_cast<float>(input.reals[i]);
  if (tensor.rank == 1)
    tensor.shape[0] = static_cast<std::int64_t>(std::max(input.integers.size(), input.reals.size()));
}

struct RequestDecoder::Parser {
  const Plan& plan;
  std::span<const EndpointSpec> endpoints;
  simdjson::ondemand::parser parser;
};

RequestDecoder::RequestDecoder(const Plan& plan, std::span<const EndpointSpec> endpoints)
    : parser_(new Parser{plan, endpoints, simdjson::ondemand::parser(body_limit(plan))}) {
  for (const EndpointSpec& endpoint : endpoints)
    if (endpoint.fields.size() > kMaxFields)
      throw std::invalid_argument("endpoint " + endpoint.name + " has too many fields");
  if (parser_->parser.allocate(body_limit(plan), kDepth) != simdjson::SUCCESS)
    throw std::runtime_error("[decode] no memory for a request body; lower the inputs' max_bytes");
}

RequestDecoder::~RequestDecoder() = default;

void RequestDecoder::decode(int endpoint, std::string_view body, std::span<Tensor> inputs, Status& status) noexcept {
  for (Tensor& tensor : inputs) tensor.present = false;
  if (body.size() > body_limit(parser_->plan))
    return status.fail(Code::invalid_request, "the body is larger than %zu bytes; send fewer or shorter texts",
                       body_limit(parser_->plan));
  Reading(parser_->plan, parser_->endpoints[static_cast<std::size_t>(endpoint)], body, inputs, status)
      .run(parser_->parser);
}

std::size_t RequestDecoder::bytes(const Plan& plan) {
  // Structural indexes and the buffer of unescaped strings, as simdjson sizes them.
  return (sizeof(std::uint32_t) + 2) * (body_limit(plan) + kBodyPadding);
}

}  // namespace dagserve
