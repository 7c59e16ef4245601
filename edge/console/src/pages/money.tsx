// Money: the balance, payments, what was spent, every posting, and the statements.
import { Suspense } from "react";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { balanceQuery, newestFirst } from "../api/queries.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { changeText, commandAmount, money, parseMoney, plainAmount } from "../format/money.ts";
import { gpuctl, readable } from "../format/text.ts";
import { useMe } from "../session/me.ts";
import { Action, REASON } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { lazyPart } from "../ui/lazy-part.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { Id, Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";
import { FirstSteps } from "./first-steps.tsx";
import { Balance } from "./overview.tsx";
import { StatementTable } from "./statements.tsx";

const Spending = lazyPart(() => import("./spending.tsx"), () => <p className="soft">What was spent cannot be shown before the page is loaded again.</p>);

const KINDS = [
  "usage", "usage_credit", "write_off", "write_off_reversal", "credit", "debit", "deposit", "refund", "refund_returned", "allocation_refund", "reversal",
  "reversal_undone", "dispute", "dispute_won",
] as const;

export default function MoneyPage() {
  const balance = useQuery(balanceQuery);
  const currency = balance.data?.currency ?? null;
  return (
    <>
      <Head title="Money" age={<Age query={balance} polled />}>
        <TopUp currency={currency} />
      </Head>
      {/* A payment leads back here. */}
      <FirstSteps account={balance.data} />
      <Loaded query={balance}>{(account) => <Balance account={account} />}</Loaded>
      {currency && (
        <Suspense fallback={<p className="loading">Loading…</p>}>
          <Spending account={balance.data?.id ?? ""} currency={currency} burn={balance.data?.burn_minor_per_hour ?? 0} />
        </Suspense>
      )}
      <Ledger />
      <div className="columns">
        <Payments />
        <Statements />
      </div>
    </>
  );
}

function TopUp({ currency }: { currency: string | null }) {
  return (
    <Action
      needs="pay"
      spec={{
        id: "top-up",
        primary: true,
        label: "Top up…",
        title: "Top up your balance",
        consequences: <p>The payment processor's page opens, where you pay. The amount is in your balance as soon as the payment is deposited.</p>,
        fields: [
          { name: "amount", sentAs: "amount_minor", label: currency ? `Amount in ${currency}` : "Amount", required: true, maxLength: 20, help: "Such as 20.00" },
          ...(currency ? [] : [{ name: "currency", label: "Currency", required: true, maxLength: 3, pattern: "[A-Z]{3}", help: "Three letters, such as EUR. It is the account's from the first payment on." }]),
        ],
        command: (values) => gpuctl("billing", "top-up", ["--amount", commandAmount(values["amount"], currency ?? values["currency"])], ["--currency", currency ?? values["currency"]]),
        send: async (values, key) => {
          const of = currency ?? values["currency"] ?? "";
          const amount = parseMoney(values["amount"] ?? "", of);
          if ("problem" in amount) throw new Error(amount.problem);
          const here = window.location.href.split(/[?#]/)[0] ?? "";
          const body = { amount_minor: amount.minor, currency: of, success_url: here, cancel_url: here };
          return dataOf(api.POST("/api/v1/billing/checkout-sessions", { params: keyed(key), body }));
        },
        refreshes: ["payments"],
        done: ({ url }) => window.location.assign(url),
        result: PaymentOpens,
      }}
    />
  );
}

/** The form stays until the page is there, so that the user does not begin a second payment. */
function PaymentOpens({ url }: { url: string }) {
  return (
    <p>
      The page of the payment opens. Where it does not, <a href={url}>open it here</a>.
    </p>
  );
}

function Ledger() {
  const [address, set] = useAddress();
  // The month that is opened is no part of it.
  const query = queryOf(address, ["kind", "allocation_id"]) as { kind?: (typeof KINDS)[number] };
  const ledger = useQuery({
    queryKey: ["ledger", query],
    queryFn: () => dataOf(api.GET("/api/v1/billing/ledger", { params: { query } })),
    placeholderData: keepPreviousData,
    // It is read again with each balance that is another one.
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Card title="Ledger" actions={<Age query={ledger} polled />}>
      <Filters
        of={[
          { name: "kind", label: "Kind", options: KINDS },
          { name: "allocation_id", label: "Allocation", hint: "its id" },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Ledger"
        query={ledger}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(posting) => String(posting.number)}
        none={<Nothing address={address}>Nothing is posted. Top up to make the first posting.</Nothing>}
        columns={[
          { title: "No.", number: true, cell: (posting) => posting.number },
          { title: "Kind", cell: (posting) => readable(posting.kind) },
          { title: "For", cell: (posting) => (posting.allocation_id ? <Id>{posting.allocation_id}</Id> : <Plain>{posting.reason}</Plain>) },
          { title: "At", cell: (posting) => <When at={posting.at} /> },
          { title: "Change", number: true, cell: (posting) => changeText(posting, posting.currency) },
          { title: "Balance", number: true, cell: (posting) => money(posting.balance_minor, posting.currency) },
        ]}
      />
    </Card>
  );
}

const REFUNDABLE = "deposited";
/** As many payments as a page of them has. */
const PAYMENTS_OF_PAGE = 20;

function Payments() {
  const [address, set] = useAddress();
  const page = address["payments_page"];
  const payments = useQuery({
    queryKey: ["payments", page],
    queryFn: () => {
      const query = { limit: PAYMENTS_OF_PAGE, ...(page ? { page_token: page } : {}) };
      return newestFirst((order) => dataOf(api.GET("/api/v1/billing/payments", { params: { query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Card title="Payments" actions={<Age query={payments} />}>
      <PagedTable
        label="Payments"
        query={payments}
        page={page}
        open={(payments_page) => set({ payments_page }, { inPlace: true })}
        keyOf={(payment) => payment.id}
        none={page ? <p>Nothing is left on this page. Go to the first one.</p> : <p>Nothing was paid in yet. Top up to begin.</p>}
        columns={[
          { title: "Amount", number: true, cell: (payment) => money(payment.amount_minor, payment.currency) },
          { title: "State", cell: (payment) => <State of={payment.state} /> },
          { title: "Begun", cell: (payment) => <When at={payment.created_at} /> },
          { title: "Note", cell: (payment) => <Plain>{payment.reason}</Plain> },
          {
            title: "Actions",
            cell: (payment) => (
              <>
                <Unpaid of={payment} />
                <Refund of={payment} />
              </>
            ),
          },
        ]}
      />
    </Card>
  );
}

/** What its payer can do with a payment that is not paid. */
function Unpaid({ of: { id, payer, state, amount_minor, currency } }: { of: Schemas["Payment"] }) {
  const isOwn = useMe().user_id === payer;
  if (!isOwn || (state !== "created" && state !== "open")) return null;
  const path = { id };
  return (
    <span className="row-actions">
      <Action
        quiet
        needs="pay"
        spec={{
          id: `pay:${id}`,
          label: "Pay…",
          title: "Pay what you began to pay",
          consequences: <p>The page of the payment opens, where you pay {money(amount_minor, currency)}.</p>,
          command: () => gpuctl("billing", "pay", id),
          send: () => dataOf(api.POST("/api/v1/billing/payments/{id}/checkout-session", { params: { path } })),
          refreshes: ["payments"],
          done: ({ url }) => window.location.assign(url),
          result: PaymentOpens,
        }}
      />
      <Action
        quiet
        needs="pay"
        spec={{
          id: `cancel-payment:${id}`,
          label: "Cancel…",
          title: "Cancel this payment",
          danger: true,
          consequences: <p>It cannot be paid any more. Nothing was taken from you for it.</p>,
          command: () => gpuctl("billing", "cancel-payment", id),
          send: (_values, key) => dataOf(api.POST("/api/v1/billing/payments/{id}/cancel", { params: { path, ...keyed(key) } })),
          refreshes: ["payments"],
        }}
      />
    </span>
  );
}

function Refund({ of: payment }: { of: Schemas["Payment"] }) {
  if (payment.state !== REFUNDABLE || BigInt(payment.left_minor) <= 0n) return null;
  const { id, currency } = payment;
  return (
    <Action
      quiet
      needs="ask_money_back"
      spec={{
        id: `refund:${id}`,
        label: "Refund…",
        title: "Refund a payment",
        danger: true,
        consequences: (
          <p>
            The amount leaves your balance at once and returns by the way that it came. At most {money(payment.left_minor, currency)} of this payment is left, and no more than is
            available.
          </p>
        ),
        fields: [{ name: "amount", sentAs: "amount_minor", label: `Amount in ${currency}`, required: true, maxLength: 20, initial: plainAmount(payment.left_minor, currency) }, REASON],
        command: (values) => gpuctl("billing", "refund", ["--payment", id], ["--amount", commandAmount(values["amount"], currency)], ["--reason", values["reason"]]),
        send: async (values, key) => {
          const amount = parseMoney(values["amount"] ?? "", currency);
          if ("problem" in amount) throw new Error(amount.problem);
          const body = { payment_id: id, amount_minor: amount.minor, reason: values["reason"] ?? "" };
          return dataOf(api.POST("/api/v1/billing/refunds", { params: keyed(key), body }));
        },
        refreshes: ["payments", "balance", "ledger"],
      }}
    />
  );
}

function Statements() {
  const statements = useQuery({
    queryKey: ["statements"],
    queryFn: () => dataOf(api.GET("/api/v1/billing/statements", { params: { query: { limit: 200 } } })),
    refetchInterval: pollEvery(60_000),
  });
  return (
    <Card title="Monthly statements" actions={<Age query={statements} polled />}>
      <Loaded query={statements}>
        {({ items, next_page }) => (
          <>
            <StatementTable
              rows={items}
              read={(month) => dataOf(api.GET("/api/v1/billing/statements/{month}", { params: { path: { month } } }))}
              fileOf={(month, kind) => `/api/v1/billing/statements/${month}/${kind}`}
            />
            {next_page && <p className="soft">Earlier months: {gpuctl("billing", "statements")}</p>}
          </>
        )}
      </Loaded>
    </Card>
  );
}
