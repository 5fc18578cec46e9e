#include "pinflow/dtype.hpp"

#include <doctest/doctest.h>

#include <complex>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"

using pinflow::dtype;
using pinflow::dtype_field;
using pinflow::dtype_kind;

namespace {

dtype_field field(const std::string& name, const char* descr, std::uint64_t offset_bytes,
                  std::vector<std::uint64_t> shape = {}) {
    return {name, "", dtype::parse(descr), std::move(shape), offset_bytes};
}

}  // namespace

TEST_CASE("dtype: reads every spelling that numpy writes, and spells it the same") {
    for (const char* const descr : {"|b1",
                                    "|i1",
                                    "<i2",
                                    "<i4",
                                    "<i8",
                                    "|u1",
                                    "<u2",
                                    "<u4",
                                    "<u8",
                                    "<f2",
                                    "<f4",
                                    "<f8",
                                    "<f16",
                                    "<c8",
                                    "<c16",
                                    "<c32",
                                    ">i2",
                                    ">u8",
                                    ">f4",
                                    ">f16",
                                    ">c16",
                                    "|S1",
                                    "|S10",
                                    "<U1",
                                    "<U5",
                                    ">U5",
                                    "|V1",
                                    "|V7",
                                    "<M8",
                                    "<m8",
                                    ">M8",
                                    "<M8[Y]",
                                    "<M8[M]",
                                    "<M8[W]",
                                    "<M8[D]",
                                    "<M8[h]",
                                    "<M8[m]",
                                    "<M8[s]",
                                    "<M8[ms]",
                                    "<M8[us]",
                                    "<M8[ns]",
                                    "<M8[ps]",
                                    "<M8[fs]",
                                    "<M8[as]",
                                    ">m8[25us]",
                                    "<m8[D]",
                                    "<M8[2147483647s]",
                                    "|S0",
                                    "<U0",
                                    ">U0",
                                    "|V0",
                                    "|S2147483647",
                                    "<U536870911",
                                    "|V2147483647"}) {
        CAPTURE(descr);
        CHECK(dtype::parse(descr).descr() == descr);
    }
}

TEST_CASE("dtype: reads common spellings that numpy accepts but does not write") {
    struct {
        const char* spelling;
        const char* descr;
    } const cases[] = {
        {"f4", "<f4"},
        {"=f4", "<f4"},
        {"|f4", "<f4"},
        {"b1", "|b1"},
        {"<b1", "|b1"},
        {">b1", "|b1"},
        {">i1", "|i1"},
        {"=U5", "<U5"},
        {"S10", "|S10"},
        {"<S10", "|S10"},
        {">S10", "|S10"},
        {">V7", "|V7"},
        {"M8", "<M8"},
        {"|M8[ns]", "<M8[ns]"},
        {"M8[1ns]", "<M8[ns]"},
        {"m8[generic]", "<m8"},
        {"bool", "|b1"},
        {"int8", "|i1"},
        {"int64", "<i8"},
        {"uint16", "<u2"},
        {"float16", "<f2"},
        {"float32", "<f4"},
        {"float64", "<f8"},
        {"float128", "<f16"},
        {"complex64", "<c8"},
        {"complex256", "<c32"},
        {"datetime64", "<M8"},
        {"datetime64[ns]", "<M8[ns]"},
        {"timedelta64[25s]", "<m8[25s]"},
    };
    for (const auto& [spelling, descr] : cases) {
        CAPTURE(spelling);
        CHECK(dtype::parse(spelling).descr() == descr);
    }
}

TEST_CASE("dtype: refuses what numpy rejects") {
    for (const char* const descr : {"",
                                    "<",
                                    "|",
                                    "<ixy",
                                    "<f3",
                                    "b2",
                                    "i3",
                                    "i16",
                                    "u0",
                                    "f12",
                                    "c4",
                                    "x4",
                                    "F4",
                                    "f4 ",
                                    " f4",
                                    "f4x",
                                    "<>f4",
                                    "f-4",
                                    "S1a",
                                    "M4",
                                    "m4[s]",
                                    "M8[]",
                                    "M8[x]",
                                    "M8[B]",
                                    "M8[-1s]",
                                    "M8[ns",
                                    "M8[ns]]",
                                    "M8ns",
                                    "M8[7/2s]",
                                    "M8[25]",
                                    "<float32",
                                    "=float32",
                                    "float96",
                                    "M8[2147483648s]",
                                    "datetime64[ns]x",
                                    "=bfloat",
                                    "bfloat8",
                                    "B2",
                                    "E1",
                                    "float8_e4m3",
                                    "\x93",
                                    "f4\n"}) {
        CAPTURE(descr);
        CHECK_THROWS_AS(dtype::parse(descr), pinflow::format_error);
    }
}

TEST_CASE("dtype: refuses other spellings that numpy accepts but does not write") {
    struct {
        const char* descr;
        const char* reason;
    } const cases[] = {
        {"|V00", "a leading zero"},
        {"S", "elements without bytes"},
        {"U", "elements without bytes"},
        {"V", "elements without bytes"},
        {"S99999999999999999999999999", "numpy's size becomes -1"},
        {"|S2147483648", "numpy's size wraps to a negative one"},
        {"|S4294967301", "numpy's size wraps to 5"},
        {"<U536870912", "numpy's size wraps to a negative one"},
        {"<U1073741824", "numpy's size wraps to 0"},
        {"f04", "a leading zero"},
        {"S010", "a leading zero"},
        {"f+4", "a sign"},
        {"f 4", "a space"},
        {"f", "a letter without a size"},
        {"<f", "a letter without a size"},
        {"?", "a letter without a size"},
        {"d", "a letter without a size"},
        {"l", "a letter without a size"},
        {"M", "a letter without a size"},
        {"a10", "gone from numpy 2"},
        {"int", "a name without a size"},
        {"float", "a name without a size"},
        {"str", "a name without a size"},
        {"bool_", "one of many names"},
        {"<datetime64[ns]", "a name with a byte order"},
        {"M8[7s/2]", "a divisor, which numpy itself resolves to [3500ms]"},
        {"M8[0s]", "a multiplier of 0"},
        {"M8[025s]", "a leading zero"},
        {"M8[2generic]", "a multiple of no unit"},
        {"M8[\xCE\xBCs]", "a Greek letter"},
        {"f4,i4", "a structured type in short"},
        {"2f4", "a subarray in short"},
        {"(2,)f4", "a subarray in short"},
    };
    for (const auto& [descr, reason] : cases) {
        CAPTURE(descr);
        CAPTURE(reason);
        CHECK_THROWS_AS(dtype::parse(descr), pinflow::format_error);
    }
}

TEST_CASE("dtype: refuses Python objects with a message about pickles") {
    for (const char* const descr : {"|O", "O", "<O", "|O8", "|O4", "object"}) {
        CAPTURE(descr);
        CHECK_THROWS_WITH_AS(dtype::parse(descr), doctest::Contains("pickle"), pinflow::unsupported);
    }
}

TEST_CASE("dtype: reads no list of fields") {
    CHECK_THROWS_WITH_AS(dtype::parse("[('a', '<f4')]"), doctest::Contains("is not read as a type"),
                         pinflow::unsupported);
}

TEST_CASE("dtype: an error quotes its input on one line and not at length") {
    const std::string hostile = "<f4\n\x01" + std::string(100'000, 'x');
    try {
        dtype::parse(hostile);
        FAIL("it was accepted");
    } catch (const pinflow::format_error& failure) {
        const std::string sentence = failure.what();
        CHECK(sentence.find('\n') == std::string::npos);
        CHECK(sentence.size() < 200);
    }
}

TEST_CASE("dtype: knows sizes and what byte order applies to") {
    struct {
        const char* descr;
        std::uint64_t size_bytes;
        std::uint64_t swap_size_bytes;
    } const cases[] = {{"|b1", 1, 1},    {">i4", 4, 4},      {"<f16", 16, 16},    {">c8", 8, 4},
                       {"<c32", 32, 16}, {"|S10", 10, 1},    {">U5", 20, 4},      {"|V7", 7, 1},
                       {"<M8[s]", 8, 8}, {"bfloat16", 2, 2}, {">bfloat16", 2, 2}, {"float8_e5m2", 1, 1}};
    for (const auto& [descr, size_bytes, swap_size_bytes] : cases) {
        CAPTURE(descr);
        const dtype type = dtype::parse(descr);
        CHECK(type.size_bytes() == size_bytes);
        CHECK(type.swap_size_bytes() == swap_size_bytes);
        CHECK(type.order() == (descr[0] == '>' ? std::endian::big : std::endian::little));
    }
}

TEST_CASE("dtype: turns big-endian types into little-endian ones and leaves the rest") {
    CHECK(dtype::parse(">M8[25s]").little_endian() == dtype::parse("<M8[25s]"));
    CHECK(dtype::parse("<f4").little_endian() == dtype::parse("<f4"));
    CHECK(dtype::parse("|S3").little_endian() == dtype::parse("|S3"));
}

TEST_CASE("dtype: is equal by kind, size, order and unit") {
    CHECK(dtype::parse("<f4") == dtype(dtype_kind::floating, 4));
    CHECK(dtype::parse("<f4") != dtype::parse(">f4"));
    CHECK(dtype::parse("<f4") != dtype::parse("<i4"));
    CHECK(dtype::parse("<M8[s]") != dtype::parse("<M8[ms]"));
    CHECK(dtype(dtype_kind::unsigned_integer, 1, std::endian::big) == dtype::parse("|u1"));
    CHECK(dtype(dtype_kind::datetime, 8, std::endian::little, "1ns") == dtype::parse("<M8[ns]"));
}

TEST_CASE("dtype: knows the types of C++") {
    CHECK(dtype::of<bool>().descr() == "|b1");
    CHECK(dtype::of<std::byte>().descr() == "|V1");
    CHECK(dtype::of<std::int8_t>().descr() == "|i1");
    CHECK(dtype::of<std::uint64_t>().descr() == "<u8");
    CHECK(dtype::of<float>().descr() == "<f4");
    CHECK(dtype::of<std::complex<double>>().descr() == "<c16");
}

TEST_CASE("dtype: cannot be made from parts that no type of numpy has") {
    CHECK_THROWS_AS(dtype(dtype_kind::floating, 3), pinflow::invalid_argument);
    CHECK_THROWS_AS(dtype(dtype_kind::unicode, 6), pinflow::invalid_argument);
    CHECK_THROWS_AS(dtype(dtype_kind::opaque, std::uint64_t{1} << 31), pinflow::invalid_argument);
    CHECK_THROWS_AS(dtype(dtype_kind::floating, 4, std::endian::little, "s"), pinflow::invalid_argument);
    CHECK_THROWS_AS(dtype(dtype_kind::datetime, 8, std::endian::little, "x"), pinflow::invalid_argument);
}

// ---- what numpy lacks -------------------------------------------------------------------------------------

TEST_CASE("dtype: names types that numpy lacks as ml_dtypes does") {
    CHECK(dtype::parse("bfloat16") == dtype(dtype_kind::bfloat16, 2));
    CHECK(dtype::parse("float8_e4m3fn") == dtype(dtype_kind::float8_e4m3fn, 1));
    CHECK(dtype::parse("float8_e5m2") == dtype(dtype_kind::float8_e5m2, 1));
    CHECK(dtype::parse("float8_e8m0fnu") == dtype(dtype_kind::float8_e8m0fnu, 1));
    CHECK(dtype::parse("float8_e4m3fnuz") == dtype(dtype_kind::float8_e4m3fnuz, 1));
    CHECK(dtype::parse("float8_e5m2fnuz") == dtype(dtype_kind::float8_e5m2fnuz, 1));
    CHECK(dtype::parse("<bfloat16") == dtype::parse("bfloat16"));
    CHECK(dtype::parse(">bfloat16") == dtype(dtype_kind::bfloat16, 2, std::endian::big));
    for (const char* const descr : {"bfloat16", ">bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
                                    "float8_e4m3fnuz", "float8_e5m2fnuz"}) {
        CHECK(dtype::parse(descr).descr() == descr);
        CHECK_FALSE(dtype::parse(descr).is_known_to_numpy());
    }
    CHECK(dtype::parse(">bfloat16").little_endian() == dtype::parse("bfloat16"));
    CHECK_FALSE(dtype::parse(">bfloat16").is_little_endian());
    CHECK(dtype(dtype_kind::float8_e5m2, 1, std::endian::big) == dtype::parse("float8_e5m2"));
    CHECK(dtype::parse("bfloat16") != dtype::parse("<f2"));
    CHECK(dtype::parse("<f2").is_known_to_numpy());
    CHECK(dtype::parse("|V1").is_known_to_numpy());
    CHECK(dtype::parse("float8_e5m2") != dtype::parse("float8_e4m3fn"));
    CHECK_THROWS_AS(dtype(dtype_kind::bfloat16, 4), pinflow::invalid_argument);
    CHECK_THROWS_AS(dtype(dtype_kind::float8_e5m2, 2), pinflow::invalid_argument);
}

// ---- structured types -------------------------------------------------------------------------------------

TEST_CASE("dtype: a structured type knows its fields") {
    const dtype type = dtype::structured({field("a", ">f4", 0), field("b", "<i2", 4, {3})}, 10);
    CHECK(type.kind() == dtype_kind::opaque);
    CHECK(type.size_bytes() == 10);
    CHECK(type.swap_size_bytes() == 1);
    REQUIRE(type.fields().size() == 2);
    CHECK(type.fields()[1] == field("b", "<i2", 4, {3}));
    CHECK(type.fields()[1].size_bytes() == 6);
    CHECK(dtype::parse("|V10").fields().empty());
    CHECK(type != dtype::parse("|V10"));
}

TEST_CASE("dtype: a structured type is spelled as numpy spells it") {
    const dtype inner = dtype::structured({field("x", "<f8", 0), field("y", ">i2", 8, {2, 0})}, 8);
    dtype_field titled = field("name", "<f4", 0);
    titled.title = "title";
    const dtype_field nested{"in", "", inner, {2}, 2};
    struct {
        std::vector<dtype_field> fields;
        std::uint64_t size_bytes;
        const char* descr;
    } const cases[] = {
        {{field("a", "<f4", 0)}, 4, "[('a', '<f4')]"},
        {{field("a", "<f4", 0, {3}), field("b", ">i2", 12, {2, 1})},
         16,
         "[('a', '<f4', (3,)), ('b', '>i2', (2, 1))]"},
        {{titled}, 4, "[(('title', 'name'), '<f4')]"},
        {{field("a", "|i1", 0), field("b", "<f8", 8), field("c", "|i1", 16)},
         24,
         "[('a', '|i1'), ('', '|V7'), ('b', '<f8'), ('c', '|i1'), ('', '|V7')]"},
        {{field("a", "|i1", 3)}, 4, "[('', '|V3'), ('a', '|i1')]"},
        {{field("a", "<f4", 0, {0}), field("b", "|V2", 0), nested},
         18,
         "[('a', '<f4', (0,)), ('b', '|V2'), ('in', [('x', '<f8'), ('y', '>i2', (2, 0))], (2,))]"},
        {{field("a", "bfloat16", 0)}, 2, "[('a', 'bfloat16')]"},
    };
    for (const auto& [fields, size_bytes, descr] : cases) {
        CHECK(dtype::structured(fields, size_bytes).descr() == descr);
    }
}

TEST_CASE("dtype: names of fields are spelled as Python spells strings") {
    struct {
        std::string name;
        const char* spelling;
    } const cases[] = {
        {"it's", R"("it's")"},
        {R"(say "a")", R"('say "a"')"},
        {R"(it's "a")", R"('it\'s "a"')"},
        {R"(a\b)", R"('a\\b')"},
        {"a\tb\nc\rd", R"('a\tb\nc\rd')"},
        {std::string("\0\x1f\x7f", 3), R"('\x00\x1f\x7f')"},
        {"\u0080\u009f\u00a0\u00a1\u00ad\u00ff", R"('\x80\x9f\xa0¡\xadÿ')"},
        {"数据 \U0001F600", "'数据 \U0001F600'"},
    };
    for (const auto& [name, spelling] : cases) {
        CHECK(dtype::structured({field(name, "<f4", 0)}, 4).descr() ==
              "[(" + std::string(spelling) + ", '<f4')]");
    }
}

TEST_CASE("dtype: a structured type may have no fields, and fields without bytes") {
    const dtype none = dtype::structured({}, 0);
    CHECK(none.is_structured());
    CHECK(none.size_bytes() == 0);
    CHECK(none.descr() == "[]");
    CHECK(none == dtype::structured({}, 0));
    CHECK(none != dtype::parse("|V0"));
    CHECK_FALSE(dtype::parse("|V0").is_structured());
    CHECK(dtype::structured({}, 4).descr() == "[('', '|V4')]");
    CHECK(dtype::structured({}, 4) != none);
    const dtype type = dtype::structured(
        {field("a", "|S0", 0), {"b", "", none, {2}, 0}, field("c", ">i4", 0), field("d", ">U0", 4)}, 4);
    CHECK(type.descr() == "[('a', '|S0'), ('b', [], (2,)), ('c', '>i4'), ('d', '>U0')]");
    CHECK(type.little_endian().descr() == "[('a', '|S0'), ('b', [], (2,)), ('c', '<i4'), ('d', '<U0')]");
}

TEST_CASE("dtype: structured types are equal by value") {
    const auto make = [](const char* name, const char* title, const char* descr, std::uint64_t offset_bytes,
                         std::uint64_t size_bytes, std::vector<std::uint64_t> shape) {
        dtype_field inner = field(name, descr, offset_bytes, std::move(shape));
        inner.title = title;
        const dtype type = dtype::structured({inner}, size_bytes);
        return dtype::structured({{"outer", "", type, {}, 0}}, size_bytes);
    };
    const dtype type = make("a", "t", "<f4", 0, 8, {1});
    CHECK(type == make("a", "t", "<f4", 0, 8, {1}));
    CHECK(type == dtype(type));
    CHECK(type != make("b", "t", "<f4", 0, 8, {1}));
    CHECK(type != make("a", "", "<f4", 0, 8, {1}));
    CHECK(type != make("a", "t", ">f4", 0, 8, {1}));
    CHECK(type != make("a", "t", "<f4", 4, 8, {1}));
    CHECK(type != make("a", "t", "<f4", 0, 9, {1}));
    CHECK(type != make("a", "t", "<f4", 0, 8, {}));
}

TEST_CASE("dtype: a structured type becomes little-endian in every field") {
    const auto make = [](const char* prefix) {
        const std::string descr = std::string(prefix) + "f4";
        const dtype inner = dtype::structured({field("x", descr.c_str(), 0), field("y", "|S3", 4)}, 8);
        return dtype::structured({field("a", "|u1", 0), {"b", "t", inner, {2}, 4}}, 24);
    };
    CHECK_FALSE(make(">").is_little_endian());
    CHECK(make(">").order() == std::endian::little);
    CHECK(make("<").is_little_endian());
    CHECK(make(">").little_endian() == make("<"));
    CHECK(make("<").little_endian() == make("<"));
}

TEST_CASE("dtype: fields live as long as a copy of the type") {
    dtype copy = dtype::of<float>();
    {
        const dtype type = dtype::structured({field("a", "<f4", 0)}, 4);
        copy = type;
    }
    const auto fields = copy.fields();
    const dtype another = copy;
    copy = dtype::of<float>();
    CHECK(fields[0].name == "a");
}

TEST_CASE("dtype: refuses fields that cannot be combined") {
    dtype_field titled = field("b", "<f4", 4);
    titled.title = "a";
    struct {
        std::vector<dtype_field> fields;
        std::uint64_t size_bytes;
        const char* sentence;
    } const cases[] = {
        {{field("a", "|V0", 0, {2})}, 4, "is an array of |V0, which numpy rejects"},
        {{field("a", "<U0", 0, {0})}, 4, "is an array of <U0, which numpy rejects"},
        {{field("a", "<f4", 0)}, std::uint64_t{1} << 31, "cannot have 2147483648 bytes"},
        {{field("a", "<f4", 0), field("a", "<f4", 4)}, 8, "two fields of a structured type are called 'a'"},
        {{field("a", "<f4", 0), titled}, 8, "two fields of a structured type are called 'a'"},
        {{field("", "<f4", 0)}, 4, "an empty name"},
        {{field("\xE9", "<f4", 0)}, 4, "is not valid UTF-8"},
        {{field("a", "<f4", 0), field("b", "<f4", 3)},
         8,
         "'b' begins at offset 3, but the field before it ends at offset 4"},
        {{field("a", "<f4", 4), field("b", "<f4", 0)},
         8,
         "'b' begins at offset 0, but the field before it ends at offset 8"},
        {{field("a", "<f4", 1)}, 4, "it has 4 bytes at offset 1, the type has 4 bytes"},
        {{field("a", "<f4", ~std::uint64_t{0})}, 4, "the field 'a' does not fit into its type"},
        {{field("a", "<f4", 0, {2})}, 7, "it has 8 bytes at offset 0, the type has 7 bytes"},
        {{field("a", "<f4", 0, {1u << 29})}, 4, "larger than numpy allows"},
        {{field("a", "<f4", 0, {1ull << 32, 1ull << 32})}, 4, "larger than numpy allows"},
        {{field("a", "<f4", 0, {0, ~std::uint64_t{0}})}, 4, "larger than numpy allows"},
        {{field("a", "<f4", 0, std::vector<std::uint64_t>(65, 1))}, 4, "has 65 axes"},
    };
    for (const auto& [fields, size_bytes, sentence] : cases) {
        CHECK_THROWS_WITH_AS(dtype::structured(fields, size_bytes), doctest::Contains(sentence),
                             pinflow::invalid_argument);
    }
}
